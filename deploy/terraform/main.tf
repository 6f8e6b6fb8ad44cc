# Topics, ordered subscriptions, dead-letter topics, and a service account for the relay that may publish to
# these topics and look them up.

data "google_project" "this" {
  project_id = var.project
}

locals {
  # The account as which Pub/Sub itself moves messages to a dead-letter topic.
  pubsub_agent = "serviceAccount:service-${data.google_project.this.number}@gcp-sa-pubsub.iam.gserviceaccount.com"

  subscriptions = merge([
    for topic, settings in var.topics : {
      for name, subscription in settings.subscriptions :
      name => merge(subscription, { topic = topic })
    }
  ]...)

  # The subscriptions that move messages to a dead-letter topic.
  dead_lettered = {
    for name, subscription in local.subscriptions :
    name => subscription if subscription.max_delivery_attempts != null
  }

  consumers = merge([
    for name, subscription in local.subscriptions : {
      for member in subscription.consumers :
      "${name} ${member}" => { subscription = name, member = member }
    }
  ]...)

  published = toset(concat(
    keys(var.topics),
    var.relay_dead_letter_topic == "" ? [] : [var.relay_dead_letter_topic],
  ))
}

resource "google_pubsub_topic" "events" {
  for_each                   = var.topics
  project                    = var.project
  name                       = each.key
  message_retention_duration = each.value.retention

  message_storage_policy {
    allowed_persistence_regions = [var.region]
  }
}

# Without a subscription a topic keeps no messages, so the dead-letter topic gets one.
resource "google_pubsub_topic" "relay_dead_letter" {
  count   = var.relay_dead_letter_topic == "" ? 0 : 1
  project = var.project
  name    = var.relay_dead_letter_topic

  message_storage_policy {
    allowed_persistence_regions = [var.region]
  }
}

resource "google_pubsub_subscription" "relay_dead_letter" {
  count                      = var.relay_dead_letter_topic == "" ? 0 : 1
  project                    = var.project
  name                       = var.relay_dead_letter_topic
  topic                      = google_pubsub_topic.relay_dead_letter[0].id
  message_retention_duration = "2678400s"

  expiration_policy {
    ttl = ""
  }
}

resource "google_pubsub_subscription" "events" {
  for_each                   = local.subscriptions
  project                    = var.project
  name                       = each.key
  topic                      = google_pubsub_topic.events[each.value.topic].id
  enable_message_ordering    = true
  ack_deadline_seconds       = each.value.ack_deadline_seconds
  message_retention_duration = "604800s"

  # The subscription never expires, even if nobody uses it.
  expiration_policy {
    ttl = ""
  }

  retry_policy {
    minimum_backoff = "1s"
    maximum_backoff = "60s"
  }

  # Once Pub/Sub moves a message to the dead-letter topic, later messages of its key are delivered. The
  # consumer has to handle the gap.
  dynamic "dead_letter_policy" {
    for_each = each.value.max_delivery_attempts == null ? [] : [each.value.max_delivery_attempts]
    content {
      dead_letter_topic     = google_pubsub_topic.dead_letter[each.key].id
      max_delivery_attempts = dead_letter_policy.value
    }
  }
}

resource "google_pubsub_topic" "dead_letter" {
  for_each = local.dead_lettered
  project  = var.project
  name     = "${each.key}.dead-letter"

  message_storage_policy {
    allowed_persistence_regions = [var.region]
  }
}

resource "google_pubsub_subscription" "dead_letter" {
  for_each                   = local.dead_lettered
  project                    = var.project
  name                       = "${each.key}.dead-letter"
  topic                      = google_pubsub_topic.dead_letter[each.key].id
  message_retention_duration = "2678400s"

  expiration_policy {
    ttl = ""
  }
}

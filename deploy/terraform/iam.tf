resource "google_service_account" "relay" {
  project      = var.project
  account_id   = var.account_id
  display_name = "Postrider relay"
}

# These rights are per topic and not per project. A service that can insert events chooses the
# topic, so the rights limit where it can publish.
resource "google_pubsub_topic_iam_member" "relay_publishes" {
  for_each = local.published
  project  = var.project
  topic    = each.value
  role     = "roles/pubsub.publisher"
  member   = google_service_account.relay.member

  depends_on = [google_pubsub_topic.events, google_pubsub_topic.relay_dead_letter]
}

# `postrider check` reads each topic and lists its subscriptions.
resource "google_pubsub_topic_iam_member" "relay_looks" {
  for_each = local.published
  project  = var.project
  topic    = each.value
  role     = "roles/pubsub.viewer"
  member   = google_service_account.relay.member

  depends_on = [google_pubsub_topic.events, google_pubsub_topic.relay_dead_letter]
}

resource "google_service_account_iam_member" "workload_identity" {
  count              = var.kubernetes_service_account == "" ? 0 : 1
  service_account_id = google_service_account.relay.name
  role               = "roles/iam.workloadIdentityUser"
  member             = "serviceAccount:${var.project}.svc.id.goog[${var.kubernetes_service_account}]"
}

resource "google_project_iam_member" "cloud_sql" {
  count   = var.cloud_sql ? 1 : 0
  project = var.project
  role    = "roles/cloudsql.client"
  member  = google_service_account.relay.member
}

resource "google_project_iam_member" "cloud_sql_login" {
  count   = var.cloud_sql_iam_login ? 1 : 0
  project = var.project
  role    = "roles/cloudsql.instanceUser"
  member  = google_service_account.relay.member
}

resource "google_pubsub_subscription_iam_member" "consumer" {
  for_each     = local.consumers
  project      = var.project
  subscription = google_pubsub_subscription.events[each.value.subscription].name
  role         = "roles/pubsub.subscriber"
  member       = each.value.member
}

# To move a message, Pub/Sub publishes it to the dead-letter topic and acknowledges the original.
resource "google_pubsub_topic_iam_member" "agent_publishes" {
  for_each = local.dead_lettered
  project  = var.project
  topic    = google_pubsub_topic.dead_letter[each.key].name
  role     = "roles/pubsub.publisher"
  member   = local.pubsub_agent
}

resource "google_pubsub_subscription_iam_member" "agent_acknowledges" {
  for_each     = local.dead_lettered
  project      = var.project
  subscription = google_pubsub_subscription.events[each.key].name
  role         = "roles/pubsub.subscriber"
  member       = local.pubsub_agent
}

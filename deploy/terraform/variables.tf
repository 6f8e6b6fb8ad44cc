variable "project" {
  description = "Google Cloud project of the topics: the relay's setting `project`."
  type        = string
}

variable "region" {
  description = "Region that stores the messages. Use the endpoint of the same region: Pub/Sub keeps the order of a key only among publishes in one region."
  type        = string
}

variable "topics" {
  description = "Topics, each with its subscriptions. By default the relay publishes an event to the topic `<aggregatetype>.events`."
  type = map(object({
    # How long the topic itself keeps messages, so that a subscription can seek back.
    retention = optional(string, "604800s")
    subscriptions = optional(map(object({
      # The members that may consume, such as
      # serviceAccount:billing@my-project.iam.gserviceaccount.com
      consumers            = optional(list(string), [])
      ack_deadline_seconds = optional(number, 60)
      # After this many failed deliveries, Pub/Sub moves the message to the dead-letter topic, and
      # delivers later messages of its key. With null, Pub/Sub retries forever and keeps the order
      # per key.
      max_delivery_attempts = optional(number)
    })), {})
  }))

  validation {
    condition = alltrue(flatten([
      for topic in values(var.topics) : [
        for subscription in values(topic.subscriptions) :
        coalesce(subscription.max_delivery_attempts, 5) >= 5 && coalesce(subscription.max_delivery_attempts, 5) <= 100
      ]
    ]))
    error_message = "max_delivery_attempts must be 5 to 100: Pub/Sub accepts no other number."
  }

  validation {
    condition = (
      length(flatten([for topic in values(var.topics) : keys(topic.subscriptions)])) ==
      length(distinct(flatten([for topic in values(var.topics) : keys(topic.subscriptions)])))
    )
    error_message = "Two subscriptions have the same name: a name must be unique in the project."
  }
}

variable "relay_dead_letter_topic" {
  description = "Topic for copies of quarantined events: the relay's setting `dead_letter_topic`. Empty for none."
  type        = string
  default     = ""
}

variable "account_id" {
  description = "Name of the relay's service account."
  type        = string
  default     = "postrider"
}

variable "kubernetes_service_account" {
  description = "Kubernetes service account that may act as the relay, as namespace/name. Empty without GKE."
  type        = string
  default     = ""
}

variable "cloud_sql" {
  description = "Whether the relay connects through the Cloud SQL Auth Proxy."
  type        = bool
  default     = false
}

variable "cloud_sql_iam_login" {
  description = "Whether the relay logs in to Cloud SQL as its service account, instead of with a password."
  type        = bool
  default     = false
}

output "service_account" {
  description = "Account of the relay, for Workload Identity, a worker pool or a key file."
  value       = google_service_account.relay.email
}

output "environment" {
  description = "Settings of the relay that follow from these resources."
  value = merge(
    {
      PUBSUB_PROJECT_ID         = var.project
      POSTRIDER_PUBSUB_ENDPOINT = "https://${var.region}-pubsub.googleapis.com"
    },
    var.relay_dead_letter_topic == "" ? {} : {
      POSTRIDER_DEAD_LETTER_TOPIC = var.relay_dead_letter_topic
    },
  )
}

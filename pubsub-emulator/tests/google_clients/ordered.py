"""Publishes and receives in order through Google's own Python client.

Arguments: project, number of ordering keys, messages per key. Prints one JSON object: the data
of the received messages per key, in the order of reception. The first message of the first key
is nacked once.
"""

import json
import sys
import threading

from google.cloud import pubsub_v1

DEADLINE_SECONDS = 60


def main(project, key_count, per_key):
    options = pubsub_v1.types.PublisherOptions(enable_message_ordering=True)
    publisher = pubsub_v1.PublisherClient(publisher_options=options)
    subscriber = pubsub_v1.SubscriberClient()
    topic = publisher.topic_path(project, "python-orders")
    subscription = subscriber.subscription_path(project, "python-orders")
    publisher.create_topic(name=topic)
    subscriber.create_subscription(
        request={"name": subscription, "topic": topic, "enable_message_ordering": True}
    )

    keys = [f"key-{n}" for n in range(key_count)]
    published = [
        publisher.publish(
            topic,
            f"{n}".encode(),
            ordering_key=key,
            event_id=f"{key}/{n}",
        )
        for n in range(per_key)
        for key in keys
    ]
    message_ids = [future.result(timeout=DEADLINE_SECONDS) for future in published]

    received = {key: [] for key in keys}
    nacked = []
    complete = threading.Event()
    lock = threading.Lock()

    def on_message(message):
        with lock:
            received[message.ordering_key].append(int(message.data))
            if message.ordering_key == keys[0] and not nacked:
                nacked.append(message.message_id)
                message.nack()
                return
            # The nacked message and all later messages of its key are redelivered.
            again = received[keys[0]].count(per_key - 1) >= 1 and received[keys[0]].count(0) >= 2
            done = all(values and values[-1] == per_key - 1 for values in received.values())
        message.ack()
        if again and done:
            complete.set()

    stream = subscriber.subscribe(subscription, callback=on_message)
    finished = complete.wait(timeout=DEADLINE_SECONDS)
    stream.cancel()
    stream.result(timeout=DEADLINE_SECONDS)

    # Acknowledged messages are not redelivered.
    left = subscriber.pull(
        request={"subscription": subscription, "max_messages": 10, "return_immediately": True}
    )
    print(
        json.dumps(
            {
                "finished": finished,
                "message_ids": len(set(message_ids)),
                "received": received,
                "left": len(left.received_messages),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

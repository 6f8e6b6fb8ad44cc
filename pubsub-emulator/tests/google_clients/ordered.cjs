// Publishes and receives in order through Google's own Node client.
//
// Arguments: project, number of ordering keys, messages per key. Prints one JSON object with the
// data of the received messages per key, in the order in which they were received. The first
// message of the first key is nacked once.

const { PubSub } = require('@google-cloud/pubsub');

const DEADLINE_MS = 60_000;

async function main(projectId, keyCount, perKey) {
  const pubsub = new PubSub({ projectId });
  await pubsub.createTopic('node-orders');
  const topic = pubsub.topic('node-orders', { messageOrdering: true });
  const [subscription] = await topic.createSubscription('node-orders', {
    enableMessageOrdering: true,
  });

  const keys = Array.from({ length: keyCount }, (_, n) => `key-${n}`);
  const published = [];
  for (let n = 0; n < perKey; n += 1) {
    for (const orderingKey of keys) {
      const attributes = { event_id: `${orderingKey}/${n}` };
      published.push(topic.publishMessage({ data: Buffer.from(`${n}`), orderingKey, attributes }));
    }
  }
  const messageIds = await Promise.all(published);

  const received = Object.fromEntries(keys.map((key) => [key, []]));
  let nacked = false;
  const finished = await new Promise((resolve, reject) => {
    const timer = setTimeout(() => resolve(false), DEADLINE_MS);
    subscription.on('error', reject);
    subscription.on('message', (message) => {
      received[message.orderingKey].push(Number(message.data.toString()));
      if (message.orderingKey === keys[0] && !nacked) {
        nacked = true;
        message.nack();
        return;
      }
      message.ack();
      const again = received[keys[0]].filter((value) => value === 0).length >= 2;
      if (again && Object.values(received).every((values) => values.at(-1) === perKey - 1)) {
        clearTimeout(timer);
        resolve(true);
      }
    });
  });
  await subscription.close();
  await pubsub.close();
  const summary = { finished, message_ids: new Set(messageIds).size, received };
  console.log(JSON.stringify(summary));
}

const [projectId, keyCount, perKey] = process.argv.slice(2);
main(projectId, Number(keyCount), Number(perKey)).catch((error) => {
  console.error(error);
  process.exit(1);
});

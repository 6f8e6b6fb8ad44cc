//! The topics and subscriptions that exist, and the links between them.
//!
//! The publisher service and the subscriber service share the registry. To avoid deadlocks, all code
//! takes locks in this order: subscriptions, topics, one topic, one subscription.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use tonic::Status;

use crate::faults::Faults;
use crate::journal::{Journal, Recording};
use crate::names::{self, Kind};
use crate::proto;
use crate::subscription::{Gone, Subscription};
use crate::topic::Topic;

/// Number of items on a page of a list, unless the client asks for another number.
const DEFAULT_PAGE: usize = 100;
/// Maximum number of items on a page of a list.
const MAX_PAGE: usize = 1_000;

type Named<T> = RwLock<BTreeMap<String, Arc<T>>>;

/// The resources of one emulator.
#[derive(Debug)]
pub(crate) struct Registry {
    pub(crate) journal: Journal,
    pub(crate) faults: Faults,
    pub(crate) next_message_id: AtomicU64,
    next_incarnation: AtomicU64,
    topics: Named<Topic>,
    subscriptions: Named<Subscription>,
}

impl Registry {
    pub(crate) fn new(recording: Recording) -> Self {
        Self {
            journal: Journal::new(recording),
            faults: Faults::default(),
            next_message_id: AtomicU64::new(1),
            next_incarnation: AtomicU64::new(1),
            topics: Named::default(),
            subscriptions: Named::default(),
        }
    }

    pub(crate) fn topic(&self, name: &str) -> Result<Arc<Topic>, Status> {
        names::check(Kind::Topic, name)?;
        match read(&self.topics).get(name) {
            Some(topic) if !self.faults.is_removed(name) => Ok(Arc::clone(topic)),
            Some(_) | None => Err(names::not_found(name)),
        }
    }

    pub(crate) fn create_topic(&self, mut resource: proto::Topic) -> Result<proto::Topic, Status> {
        names::check(Kind::Topic, &resource.name)?;
        refuse_topic_features(&resource)?;
        let mut topics = write(&self.topics);
        if let Some(topic) = topics.get(&resource.name) {
            return if self.faults.restore_topic(&resource.name) {
                Ok(topic.resource())
            } else {
                Err(names::already_exists(&resource.name))
            };
        }
        resource.state = proto::topic::State::Active.into();
        topics.insert(
            resource.name.clone(),
            Arc::new(Topic::new(resource.clone())),
        );
        Ok(resource)
    }

    /// Deletes a topic. The subscriptions of the topic stay but get no more messages, not even from
    /// a later topic of the same name.
    pub(crate) fn delete_topic(&self, name: &str) -> Result<(), Status> {
        let topic = self.topic(name)?;
        write(&self.topics).remove(name);
        for subscription in topic.subscriptions() {
            subscription.change(|resource| resource.topic = names::DELETED_TOPIC.to_owned());
        }
        Ok(())
    }

    pub(crate) fn topics_of(&self, project: &str) -> Vec<proto::Topic> {
        of_project(&read(&self.topics), project)
            .filter(|(name, _)| !self.faults.is_removed(name))
            .map(|(_, topic)| topic.resource())
            .collect()
    }

    pub(crate) fn subscription(&self, name: &str) -> Result<Arc<Subscription>, Status> {
        names::check(Kind::Subscription, name)?;
        read(&self.subscriptions)
            .get(name)
            .cloned()
            .ok_or_else(|| names::not_found(name))
    }

    pub(crate) fn create_subscription(
        &self,
        resource: proto::Subscription,
    ) -> Result<proto::Subscription, Status> {
        let name = resource.name.clone();
        let topic_name = resource.topic.clone();
        let incarnation = self.next_incarnation.fetch_add(1, Ordering::Relaxed);
        let subscription = Arc::new(Subscription::new(resource, incarnation)?);

        let mut subscriptions = write(&self.subscriptions);
        if subscriptions.contains_key(&name) {
            return Err(names::already_exists(&name));
        }
        self.topic(&topic_name)?.attach(Arc::clone(&subscription));
        subscriptions.insert(name, Arc::clone(&subscription));
        Ok(subscription.resource())
    }

    pub(crate) fn delete_subscription(&self, name: &str) -> Result<(), Status> {
        let subscription = self.subscription(name)?;
        write(&self.subscriptions).remove(name);
        self.unhook(&subscription, Gone::Deleted);
        Ok(())
    }

    /// Detaches a subscription. The subscription stays, but its messages are dropped and it
    /// receives no new ones.
    pub(crate) fn detach_subscription(&self, name: &str) -> Result<(), Status> {
        let subscription = self.subscription(name)?;
        self.unhook(&subscription, Gone::Detached);
        subscription.change(|resource| resource.detached = true);
        Ok(())
    }

    pub(crate) fn subscriptions_of(&self, project: &str) -> Vec<proto::Subscription> {
        of_project(&read(&self.subscriptions), project)
            .map(|(_, subscription)| subscription.resource())
            .collect()
    }

    fn unhook(&self, subscription: &Subscription, gone: Gone) {
        if let Some(topic) = read(&self.topics).get(&subscription.resource().topic) {
            topic.detach(subscription.name());
        }
        subscription.end(gone);
    }
}

fn refuse_topic_features(resource: &proto::Topic) -> Result<(), Status> {
    let unsupported = [
        (resource.schema_settings.is_some(), "schema_settings"),
        (
            resource.ingestion_data_source_settings.is_some(),
            "ingestion_data_source_settings",
        ),
        (
            !resource.message_transforms.is_empty(),
            "message_transforms",
        ),
    ];
    match unsupported.iter().find(|(used, _)| *used) {
        Some((_, field)) => Err(unsupported_field(field)),
        None => Ok(()),
    }
}

/// Builds an UNIMPLEMENTED error with the name of the field. A silently ignored field would mislead
/// the client.
pub(crate) fn unsupported_field(field: &str) -> Status {
    Status::unimplemented(format!(
        "This emulator does not support the field {field}. Leave it out, or test this part \
         against Pub/Sub itself."
    ))
}

fn of_project<'a, T>(
    named: &'a BTreeMap<String, Arc<T>>,
    project: &str,
) -> impl Iterator<Item = (&'a String, &'a Arc<T>)> {
    let prefix = format!("{project}/");
    let start = Bound::Included(prefix.as_str());
    let from_start = named.range::<str, _>((start, Bound::Unbounded));
    from_start.take_while(move |(name, _)| name.starts_with(&prefix))
}

/// Returns one page of items that are sorted by name, and the token of the next page. The page begins after
/// the name `page_token`. The token of the next page is the last name on this page, or empty if this is the
/// last page.
pub(crate) fn page<T>(
    items: Vec<T>,
    name: impl for<'a> Fn(&'a T) -> &'a String,
    page_size: i32,
    page_token: &str,
) -> (Vec<T>, String) {
    let size = match usize::try_from(page_size) {
        Ok(0) | Err(_) => DEFAULT_PAGE,
        Ok(size) => size.min(MAX_PAGE),
    };
    let mut rest = items
        .into_iter()
        .filter(|item| name(item).as_str() > page_token);
    let page: Vec<T> = rest.by_ref().take(size).collect();
    let next_page_token = match (rest.next(), page.last()) {
        (Some(_), Some(last)) => name(last).clone(),
        (Some(_) | None, _) => String::new(),
    };
    (page, next_page_token)
}

fn read<T>(named: &Named<T>) -> RwLockReadGuard<'_, BTreeMap<String, Arc<T>>> {
    named.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(named: &Named<T>) -> RwLockWriteGuard<'_, BTreeMap<String, Arc<T>>> {
    named.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_cover_every_item_once() {
        let items: Vec<String> = (0..25).map(|n| format!("{n:02}")).collect();
        let mut seen = Vec::new();
        let mut token = String::new();
        loop {
            let (page, next) = page(items.clone(), |name| name, 10, &token);
            assert!(page.len() <= 10);
            seen.extend(page);
            token = next;
            if token.is_empty() {
                break;
            }
        }
        assert_eq!(seen, items);
    }

    #[test]
    fn a_project_does_not_list_resources_of_a_project_with_a_longer_name() {
        let registry = Registry::new(Recording::Counts);
        for name in ["projects/p/topics/abc", "projects/p1/topics/abc"] {
            let resource = proto::Topic {
                name: name.to_owned(),
                ..Default::default()
            };
            registry.create_topic(resource).expect("new");
        }
        let listed = registry.topics_of("projects/p");
        assert_eq!(listed.len(), 1);
        assert_eq!(listed[0].name, "projects/p/topics/abc");
    }
}

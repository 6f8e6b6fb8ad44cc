//! Determines the topic of an event: from a column of the row, from a rule for its aggregate type, or
//! from the template, in that order.
//!
//! Full names (`projects/p/topics/t`) are built and checked once per distinct topic, and then shared. A row can
//! choose the project only through the topic column: a value in a template must not contain a slash. Every part of a
//! name has a maximum length, because the relay keeps names in memory, in an index and in log lines.

use std::collections::HashMap;
use std::str;
use std::sync::Arc;

use decoder::Value;

use super::columns::{Finder, MappedColumn, not_utf8};
use super::error::{EventFault, MapError, SettingFault};
use super::limits;
use super::settings::{Choice, ColumnRole, TableSettings};
use super::template::TemplatePart;
use super::topic_name::{TopicNameFault, check_id, full_name};

/// Maximum number of distinct topics in each cache. It equals Pub/Sub's limit on the topics of a project,
/// so a cache rarely becomes full. A full cache is cleared.
const INTERNED_MAX: usize = 10_000;
/// Maximum capacity in bytes that `rendered` keeps between rows, so that a long name does not hold memory forever.
const KEPT_BYTES: usize = 4 * 1024;

type Names = HashMap<Box<[u8]>, Arc<str>, foldhash::fast::RandomState>;

/// Finds the topics of one table's events.
#[derive(Debug, Clone)]
pub(super) struct TopicResolver {
    /// `projects/p/topics/`.
    prefix: Box<str>,
    column: Option<MappedColumn>,
    /// Full names by aggregate type.
    rules: HashMap<Box<str>, Arc<str>>,
    pattern: Pattern,
    /// Cache of full names; the key is the value of the topic column.
    named: Names,
    /// Cache of full names; the key is the id that the template gives.
    rendered_ids: Names,
    /// The full name that the template gave for the last row that used it. Successive rows often have the
    /// same topic, and comparing with this name takes a tenth as long as a lookup in `rendered_ids`.
    previous: Option<Arc<str>>,
    /// Buffer for the current row's topic name or id. The text is checked for UTF-8 only if it is not in a
    /// cache, because the text of every cached name has been checked.
    rendered: Vec<u8>,
}

#[derive(Debug, Clone)]
enum Pattern {
    /// The same full name for every row.
    Fixed(Arc<str>),
    /// Each row must name its topic in this column, because there is no template to use instead: the settings have
    /// none, and the default template needs an aggregate type, which the settings switch off.
    Nothing(MappedColumn),
    Rendered {
        /// `projects/p/topics/`.
        prefix: Box<str>,
        /// The template of the topic's id.
        pieces: Vec<TopicPart>,
    },
}

#[derive(Debug, Clone)]
enum TopicPart {
    Text(Box<str>),
    Column(MappedColumn),
}

impl TopicResolver {
    pub(super) fn resolve(
        finder: &Finder<'_>,
        settings: &TableSettings,
        project: &str,
    ) -> Result<Self, MapError> {
        let prefix: Box<str> = format!("projects/{project}/topics/").into();
        let checked = |setting: &'static str, topic: &str| {
            full_name(&prefix, topic).map_err(|fault| {
                finder.fault(SettingFault::Topic {
                    setting,
                    topic: topic.to_owned(),
                    fault,
                })
            })
        };
        let mut rules = HashMap::new();
        for (aggregate_type, topic) in &settings.topic_rules {
            finder.needed(ColumnRole::AggregateType, "topic_rules")?;
            rules.insert(
                aggregate_type.as_str().into(),
                checked("topic_rules", topic)?,
            );
        }
        let column = finder.role(ColumnRole::Topic)?;
        let names_it = settings.topic != TableSettings::default().topic;
        let has_aggregate_type = settings.columns.choice(ColumnRole::AggregateType) != Choice::Off;
        let pattern = if let (Some(column), false, false) = (&column, names_it, has_aggregate_type)
        {
            Pattern::Nothing(column.clone())
        } else if settings.topic.columns().next().is_none() {
            Pattern::Fixed(checked("topic", &settings.topic.to_string())?)
        } else {
            let fault = |fault| {
                finder.fault(SettingFault::Topic {
                    setting: "topic",
                    topic: settings.topic.to_string(),
                    fault,
                })
            };
            let parts = settings.topic.parts();
            let (prefix, parts) = project_of(parts, &prefix).map_err(fault)?;
            let piece = |part: &TemplatePart| {
                Ok(match part {
                    TemplatePart::Text(text) => TopicPart::Text(text.as_str().into()),
                    TemplatePart::Column(name) => TopicPart::Column(finder.in_template(name)?),
                })
            };
            let pieces = parts.iter().map(piece).collect::<Result<_, _>>()?;
            Pattern::Rendered { prefix, pieces }
        };
        Ok(Self {
            prefix,
            column,
            rules,
            pattern,
            named: Names::default(),
            rendered_ids: Names::default(),
            previous: None,
            rendered: Vec::new(),
        })
    }

    /// Returns the full name of the row's topic.
    pub(super) fn topic(
        &mut self,
        row: &[Value<'_>],
        aggregate_type: Option<&str>,
    ) -> Result<Arc<str>, EventFault> {
        self.rendered.clear();
        if self.rendered.capacity() > KEPT_BYTES {
            self.rendered = Vec::new();
        }
        if let Some(column) = &self.column
            && column.append(row, &mut self.rendered)?.unwrap_or(0) > 0
        {
            return self.intern(row, None);
        }
        if !self.rules.is_empty()
            && let Some(topic) = aggregate_type.and_then(|name| self.rules.get(name))
        {
            return Ok(Arc::clone(topic));
        }
        let (prefix, pieces) = match &self.pattern {
            Pattern::Fixed(topic) => return Ok(Arc::clone(topic)),
            Pattern::Nothing(column) => return Err(column.null("the topic")),
            Pattern::Rendered { prefix, pieces } => (prefix, pieces),
        };
        for piece in pieces {
            match piece {
                TopicPart::Text(text) => self.rendered.extend_from_slice(text.as_bytes()),
                TopicPart::Column(column) => match column.append(row, &mut self.rendered)? {
                    Some(1..) => {}
                    Some(0) | None => return Err(column.null("the topic")),
                },
            }
        }
        if let Some(topic) = &self.previous
            && topic.as_bytes().get(prefix.len()..) == Some(self.rendered.as_slice())
        {
            return Ok(Arc::clone(topic));
        }
        let topic = match self.rendered_ids.get(self.rendered.as_slice()) {
            Some(topic) => Arc::clone(topic),
            None => {
                let prefix = prefix.clone();
                self.intern(row, Some(&prefix))?
            }
        };
        self.previous = Some(Arc::clone(&topic));
        Ok(topic)
    }

    /// Returns the full name of the topic that the buffer `rendered` names, and caches the full name:
    ///
    /// - With a `prefix`, the buffer has the topic's id, and the prefix names the project. The cache is `rendered_ids`.
    /// - Without a prefix, the buffer has a value of the topic column. The cache is `named`.
    fn intern(&mut self, row: &[Value<'_>], prefix: Option<&str>) -> Result<Arc<str>, EventFault> {
        let names = match prefix {
            Some(_) => &self.rendered_ids,
            None => &self.named,
        };
        if let Some(topic) = names.get(self.rendered.as_slice()) {
            return Ok(Arc::clone(topic));
        }
        let rendered = str::from_utf8(&self.rendered).map_err(|_| not_utf8(self.columns(), row))?;
        let topic = match prefix {
            Some(prefix) => check_id(rendered).map(|()| [prefix, rendered].concat().into()),
            None => full_name(&self.prefix, rendered),
        };
        let topic = topic.map_err(|fault| {
            // Truncate a very long name, because errors are logged.
            let topic = rendered
                .chars()
                .take(*limits::TOPIC_ID_CHARS.end())
                .collect();
            EventFault::Topic { topic, fault }
        })?;
        let names = match prefix {
            Some(_) => &mut self.rendered_ids,
            None => &mut self.named,
        };
        if names.len() == INTERNED_MAX {
            names.clear();
        }
        names.insert(self.rendered.as_slice().into(), Arc::clone(&topic));
        Ok(topic)
    }

    /// Whether the settings have `topic_rules`, which choose the topic by the aggregate type.
    pub(super) fn has_rules(&self) -> bool {
        !self.rules.is_empty()
    }

    /// The topic column, and the columns that the template names. `topic_rules` also read the column of the aggregate
    /// type, but this function returns that column only if the template names it.
    pub(super) fn columns(&self) -> impl Iterator<Item = &MappedColumn> {
        let pieces = match &self.pattern {
            Pattern::Fixed(_) | Pattern::Nothing(_) => &[],
            Pattern::Rendered { pieces, .. } => pieces.as_slice(),
        };
        let in_pattern = pieces.iter().filter_map(|piece| match piece {
            TopicPart::Column(column) => Some(column),
            TopicPart::Text(_) => None,
        });
        self.column.iter().chain(in_pattern)
    }
}

/// Splits a template into the prefix `projects/p/topics/` and the template of the topic's id. If the
/// template begins with a project, the result has this project; otherwise it has the project of `prefix`.
fn project_of(
    parts: &[TemplatePart],
    prefix: &str,
) -> Result<(Box<str>, Vec<TemplatePart>), TopicNameFault> {
    let mut parts = parts.to_vec();
    let mut prefix = prefix;
    let first = match parts.first() {
        Some(TemplatePart::Text(text)) => text.clone(),
        Some(TemplatePart::Column(_)) | None => String::new(),
    };
    if let Some(end) = first.rfind('/') {
        let (before, id) = first.split_at(end + 1);
        full_name("", &format!("{before}any-topic"))?;
        prefix = before;
        parts[0] = TemplatePart::Text(id.to_owned());
    }
    let has_slash =
        |part: &TemplatePart| matches!(part, TemplatePart::Text(text) if text.contains('/'));
    if parts.iter().any(has_slash) {
        Err(TopicNameFault::FullName)
    } else {
        Ok((prefix.into(), parts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFIX: &str = "projects/p/topics/";

    #[test]
    fn a_template_names_its_project_before_the_first_column_or_not_at_all() {
        let of = |template: &str| {
            let template: crate::mapping::Template = template.parse().unwrap();
            project_of(template.parts(), PREFIX).map(|(prefix, parts)| (prefix, parts.len()))
        };
        assert_eq!(of("{x}.events"), Ok((PREFIX.into(), 2)));
        assert_eq!(
            of("projects/q/topics/{x}.events"),
            Ok(("projects/q/topics/".into(), 3))
        );
        assert_eq!(of("projects/Q/topics/{x}"), Err(TopicNameFault::Project));
        for template in ["projects/{x}/topics/abc", "{x}/abc", "a/{x}", "a{x}/b"] {
            assert_eq!(of(template), Err(TopicNameFault::FullName), "{template}");
        }
    }

    #[test]
    fn the_cache_of_topic_names_is_bounded() {
        let mut topics = TopicResolver {
            prefix: PREFIX.into(),
            column: None,
            rules: HashMap::new(),
            pattern: Pattern::Rendered {
                prefix: PREFIX.into(),
                pieces: Vec::new(),
            },
            named: Names::default(),
            rendered_ids: Names::default(),
            previous: None,
            rendered: Vec::new(),
        };
        for i in 0..=INTERNED_MAX {
            topics.rendered = format!("topic-{i}").into();
            topics.intern(&[], None).unwrap();
        }
        assert_eq!(topics.named.len(), 1);
    }
}

//! Formats a preview of a recovery as text.

use printable::printable;

use crate::cli::figures;
use crate::ops::recover::preview::{RecoveryPreview, TopicPreview};
use crate::ops::recover::situation::{RecoveryReason, Situation};

pub(super) fn text(preview: &RecoveryPreview<'_>, situation: &Situation) -> String {
    let mut text = match &situation.why {
        Some(RecoveryReason { name, what, .. }) => format!(
            "slot {}: recovery is needed ({name}): {}\n\n",
            preview.slot_name,
            printable(what)
        ),
        None => format!("slot {}: recovery is not needed\n\n", preview.slot_name),
    };
    if situation.slot.as_ref().is_some_and(|slot| slot.active) {
        text +=
            "A relay is running: its events in flight have no record yet and are counted here.\n\n";
    }
    text += "Rows without a record in outbox.dispatch, which a recovery would publish now:\n";
    for table in &preview.tables {
        let rows = figures::count(table.rows, "row");
        text += &format!("\n{}: {rows}\n", printable(&table.table));
        for (name, topic) in &table.topics {
            text += &topic_text(name, topic);
        }
        if let Some(error) = &table.first_error {
            text += &format!(
                "  {} cannot become a message; the first error: {}\n",
                figures::count(table.unmappable, "row"),
                printable(error)
            );
        }
    }
    text + "\nNothing was changed.\n"
}

fn topic_text(name: &str, topic: &TopicPreview) -> String {
    let mut text = format!(
        "  -> {}: {}, {}\n",
        printable(name),
        figures::count(topic.rows, "message"),
        figures::bytes(topic.bytes)
    );
    if let (Some(oldest), Some(newest)) = (&topic.oldest, &topic.newest) {
        text += &format!(
            "     occurred from {} to {}\n",
            printable(oldest),
            printable(newest)
        );
    }
    let first = topic.first_event_ids.join(", ");
    text + &format!("     first ids {}\n", printable(&first))
}

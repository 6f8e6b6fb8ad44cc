//! The output of the demonstration: an announcement for each step, a line for each second, and a
//! summary.
//!
//! All functions only format values, except [`Screen::print`].

use std::io::Write;
use std::time::Duration;

use crate::error::{Result, failed};
use crate::figures::{grouped, milliseconds, rounded, size};
use crate::ledger::Totals;
use crate::summary::Summary;

const BOLD: &str = "1";
const FAINT: &str = "2";
const RED: &str = "1;31";
const GREEN: &str = "32";
const CYAN: &str = "36";

/// Where to print, and how.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Screen {
    /// Whether to print colours, which only a terminal can show.
    pub(crate) colours: bool,
    /// Whether to print to standard error instead of standard output.
    pub(crate) on_stderr: bool,
}

/// One line of the table. The demonstration prints one each second.
#[derive(Debug)]
pub(crate) struct Line {
    /// The time since the writers started.
    pub(crate) time: Duration,
    /// Committed events per second since the previous line.
    pub(crate) committed: f64,
    /// Delivered events per second since the previous line.
    pub(crate) delivered: f64,
    pub(crate) totals: Totals,
    pub(crate) lag_bytes: u64,
    pub(crate) p50: Option<Duration>,
    pub(crate) p99: Option<Duration>,
}

/// Addresses and commands to try after the demonstration.
#[derive(Debug)]
pub(crate) struct Playground {
    pub(crate) database_url: String,
    pub(crate) emulator: String,
    pub(crate) project: &'static str,
    pub(crate) http_addr: String,
    pub(crate) relay_pid: Option<u32>,
    pub(crate) program: String,
}

impl Screen {
    /// Prints a text as it is. The caller adds the line ends.
    ///
    /// # Errors
    /// Returns an error if the output was closed.
    pub(crate) fn print(self, text: &str) -> Result<()> {
        let written = if self.on_stderr {
            std::io::stderr().write_all(text.as_bytes())
        } else {
            let mut stdout = std::io::stdout().lock();
            stdout
                .write_all(text.as_bytes())
                .and_then(|()| stdout.flush())
        };
        written.map_err(|e| {
            failed("the output was closed")
                .caused_by(e)
                .hint("everything is cleaned up; leave the output open until the end")
        })
    }

    pub(crate) fn title(self) -> String {
        format!(
            "\n{}\n{}\n\n",
            self.paint(
                BOLD,
                "Postrider: from a committed row to an ordered Pub/Sub message"
            ),
            self.paint(
                FAINT,
                "Everything here is deleted at the end. Ctrl-C ends it early."
            ),
        )
    }

    /// Announces that the demonstration has set up one of its parts.
    pub(crate) fn step(self, text: &str) -> String {
        format!("  {} {text}\n", self.paint(GREEN, "+"))
    }

    /// Announces an event of the script, such as a kill.
    pub(crate) fn news(self, text: &str) -> String {
        let text = text.replace('\n', "\n     ");
        format!(
            "\n  {} {}\n\n",
            self.paint(CYAN, ">>"),
            self.paint(BOLD, &text)
        )
    }

    pub(crate) fn table_head(self) -> String {
        let head = format!(
            "{:>6} {:>12} {:>12} {:>10} {:>10} {:>9} {:>9}  order",
            "time", "committed/s", "delivered/s", "in flight", "slot lag", "p50", "p99"
        );
        format!("\n{}\n", self.paint(FAINT, &head))
    }

    pub(crate) fn line(self, line: &Line) -> String {
        let Line {
            time,
            committed,
            delivered,
            totals,
            lag_bytes,
            p50,
            p99,
        } = line;
        let latency = |value: &Option<Duration>| {
            value.map_or("-".into(), |time| milliseconds(time.as_secs_f64() * 1e3))
        };
        let order = match totals.out_of_order {
            0 => self.paint(GREEN, "ok"),
            violations => self.paint(RED, &format!("{violations} VIOLATED")),
        };
        let twice = match totals.repeated {
            0 => String::new(),
            repeated => format!(", {} twice", grouped(repeated)),
        };
        format!(
            "{:>4} s {:>12} {:>12} {:>10} {:>10} {:>9} {:>9}  {order}{twice}\n",
            time.as_secs_f64().round(),
            grouped(rounded(*committed)),
            grouped(rounded(*delivered)),
            grouped(totals.behind()),
            size(*lag_bytes),
            latency(p50),
            latency(p99),
        )
    }

    pub(crate) fn summary(self, summary: &Summary) -> String {
        let mut text = format!("\n{}\n", self.paint(BOLD, "Summary"));
        for (name, value) in summary.rows() {
            text += &format!("  {name:<16} {value}\n");
        }
        text + "\n"
            + &if summary.verdict.is_good() {
                self.paint(GREEN, "Nothing lost, nothing out of order.") + "\n"
            } else {
                self.paint(RED, &format!("FAILED: {}.", summary.verdict.complaint())) + "\n"
            }
    }

    /// Shows what to try next. `program` is the command that starts `postrider` from a shell.
    pub(crate) fn what_next(self, program: &str) -> String {
        let where_it_is = match program {
            "postrider" => String::new(),
            path => format!(
                "  {}\n",
                self.paint(FAINT, &format!("(postrider is {path})"))
            ),
        };
        format!(
            "\n{}\n  \
             make demo ARGS=--keep   leave it running: inspect it with psql and curl, break it\n  \
             postrider init          the SQL that your database needs; --apply runs it\n  \
             postrider check         what is still missing in your PostgreSQL and Pub/Sub\n  \
             postrider run           the relay, for real\n{where_it_is}",
            self.paint(BOLD, "What next"),
        )
    }

    pub(crate) fn playground(self, playground: &Playground) -> String {
        let Playground {
            database_url,
            emulator,
            project,
            http_addr,
            relay_pid,
            program,
        } = playground;
        let pid = relay_pid.map_or("PID".into(), |pid| pid.to_string());
        format!(
            "\n{}\nThe writers have stopped; everything else keeps running. In another terminal:\n\n  export \
             DATABASE_URL={database_url}\n  export PUBSUB_EMULATOR_HOST={emulator} \
             PUBSUB_PROJECT_ID={project}\n\n  psql $DATABASE_URL -c \"select outbox.emit('order', '7', \
             'OrderLost', '{{}}')\"\n  psql $DATABASE_URL -c 'table outbox.dispatch order by 1 desc, ordinal \
             limit 5'\n  {program} slot\n  curl http://{http_addr}/status\n  curl \
             http://{http_addr}/metrics\n\nTwo relays: start a second one, which waits as a standby, and \
             kill the first.\n\n  {program} run --http-addr off\n  kill -9 {pid}\n\nMessages appear here as \
             they arrive. {}\n\n",
            self.paint(BOLD, "Try it yourself."),
            self.paint(BOLD, "Press Ctrl-C to stop everything."),
        )
    }

    /// Formats a message that arrived after the playground was opened.
    pub(crate) fn message(self, ordering_key: &str, event_type: &str, data: &[u8]) -> String {
        let data = String::from_utf8_lossy(data);
        format!(
            "  {} {ordering_key}: {event_type} {data}\n",
            self.paint(GREEN, "received")
        )
    }

    /// Shows the end of the relay's log after a failure.
    pub(crate) fn log_tail(self, lines: &[String]) -> String {
        let lines: String = lines.iter().map(|line| format!("  | {line}\n")).collect();
        format!("\nThe end of the relay's log:\n{lines}\n")
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.colours {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Screen = Screen {
        colours: false,
        on_stderr: false,
    };

    fn line(totals: Totals) -> Line {
        Line {
            time: Duration::from_millis(12_003),
            committed: 2004.4,
            delivered: 1987.0,
            totals,
            lag_bytes: 1_400_000,
            p50: Some(Duration::from_micros(3_140)),
            p99: None,
        }
    }

    #[test]
    fn a_line_is_aligned_with_the_head_of_the_table() {
        let totals = Totals {
            committed: 1_300,
            delivered: 100,
            repeated: 44,
            ..Totals::default()
        };
        let head = PLAIN.table_head();
        let text = PLAIN.line(&line(totals));
        assert_eq!(
            text,
            "  12 s        2,004        1,987      1,200   1,367 kB    3.1 ms         -  ok, 44 twice\n"
        );
        assert_eq!(
            head.trim_start_matches('\n').find("order"),
            text.find("ok"),
            "{head}{text}"
        );
    }

    #[test]
    fn an_order_violation_is_shown_in_the_line() {
        let totals = Totals {
            out_of_order: 2,
            ..Totals::default()
        };
        assert!(PLAIN.line(&line(totals)).ends_with("  2 VIOLATED\n"));
    }

    #[test]
    fn without_a_terminal_there_are_no_colours() {
        let coloured = Screen {
            colours: true,
            ..PLAIN
        };
        assert!(coloured.title().contains('\x1b'));
        assert!(
            !(PLAIN.title() + &PLAIN.news("x") + &PLAIN.what_next("postrider")).contains('\x1b')
        );
    }
}

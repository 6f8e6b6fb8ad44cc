//! Colours text, on a terminal only; `NO_COLOR` and `TERM=dumb` turn colours off.

use std::io::IsTerminal;

use slot_manager::Severity;

/// Whether the user wants colours on a terminal.
pub(super) fn is_wanted() -> bool {
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    !is_set("NO_COLOR") && !is_dumb()
}

/// Whether the terminal knows no control sequences.
pub(super) fn is_dumb() -> bool {
    std::env::var_os("TERM").is_some_and(|name| name == "dumb")
}

/// Whether to use colours on standard output, decided once.
#[derive(Debug, Clone, Copy)]
pub(super) struct Paint(bool);

impl Paint {
    pub(super) fn stdout() -> Self {
        Self(std::io::stdout().is_terminal() && is_wanted())
    }

    /// Never colours.
    #[cfg(test)]
    pub(super) const PLAIN: Self = Self(false);

    /// Returns the text in the colour of a severity. Pad the text before this call, because `format!` counts
    /// escape codes as width.
    pub(super) fn severity(self, severity: Severity, text: &str) -> String {
        self.paint(
            text,
            match severity {
                Severity::Ok => "32",
                Severity::Info => "36",
                Severity::Warning => "33",
                Severity::Error => "1;31",
            },
        )
    }

    pub(super) fn faint(self, text: &str) -> String {
        self.paint(text, "2")
    }

    fn paint(self, text: &str, code: &str) -> String {
        if self.0 {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_coloured_on_a_terminal_only() {
        assert_eq!(Paint(false).severity(Severity::Error, "lost"), "lost");
        assert_eq!(
            Paint(true).severity(Severity::Error, "lost"),
            "\x1b[1;31mlost\x1b[0m"
        );
    }
}

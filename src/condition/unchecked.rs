//! Names the checks that the relay may be unable to make while it delivers events.

use serde::{Deserialize, Serialize};

/// A check that the relay cannot make, although it delivers events, at least to the topics that work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unchecked {
    /// The relay cannot check its publication and its slot.
    Publication,
    /// The relay cannot check whether the stream leaves out rows. There is no sign that any row is missing.
    Tables,
    /// The stream may have left out rows, for example because the publication or a table has changed. These rows are
    /// not published until an audit succeeds. Audits fail, or no audit has looked for the rows yet.
    Gap,
}

impl Unchecked {
    /// Describes what the relay cannot do. The text completes a sentence that begins with "the relay".
    pub(super) fn meaning(self) -> &'static str {
        match self {
            Self::Publication => "could not check its publication and its slot",
            Self::Tables => "could not look for rows that the stream leaves out",
            Self::Gap => {
                "has not published the rows that the stream may have left out, because no audit has succeeded"
            }
        }
    }
}

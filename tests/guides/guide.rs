//! A page of docs/ and its blocks of code.

use std::path::Path;

use crate::blocks::blocks;

pub(crate) struct Guide {
    name: &'static str,
    text: String,
}

impl Guide {
    pub(crate) fn read(name: &'static str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("docs")
            .join(name);
        let text = std::fs::read_to_string(path).expect("a page");
        Self { name, text }
    }

    /// Returns the first block in this language (`sh`, `sql`, `toml`) that contains the text.
    pub(crate) fn block(&self, language: &str, text: &str) -> String {
        let all = blocks(Path::new(self.name), &self.text);
        let mut matching = all.into_iter().filter(|block| block.language == language);
        let found = matching.find(|block| block.text.contains(text));
        found
            .unwrap_or_else(|| panic!("{} has no {language} with {text}", self.name))
            .text
    }
}

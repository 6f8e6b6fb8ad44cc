//! Checks that comments, documents and messages are in plain English: phrases that a reader has to decode
//! must be rare.
//!
//! This check only raises an alarm. It cannot judge a sentence. Never reword a sentence only to satisfy
//! the check: rewrite the thought.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use regex_lite::Regex;

/// Maximum number of hits per 1,000 words. Good projects in this field have 0.2 to 0.6.
const ALLOWED: f64 = 0.5;

/// For each phrase, why it is hard to read, and a pattern that finds it.
const PHRASES: [(&str, &str); 11] = [
    (
        "a clause without a noun: say which thing",
        r"\b[Ww]hat (is|was|has|had|comes|came|goes|stands|waits|lies|would|cannot|can|needs|it|they|PostgreSQL|no|may|must|becomes|an earlier)\b",
    ),
    (
        "whoever, whichever: name the thing",
        r"\b(who|what|which|whom)ever\b",
    ),
    (
        "stands: write is",
        r"\b(stands?|stood) (in|at|on|there|beside|here|for itself|by)\b",
    ),
    (
        "is told, tells: write reports, shows",
        r"\b(is|are|was|were|be) told\b|\btells (of|that|what|which|whether|how)\b",
    ),
    (
        "goes on, comes again: write continues, repeats",
        r"\b(comes?|came|goes|went|go) (again|on|beside)\b",
    ),
    (
        "so many, so long: give the quantity",
        r"\b[Ss]o (many|much|long|few|large|old)\b",
    ),
    ("beside: write next to, or also", r"\b[Bb]eside\b"),
    (
        "an old-fashioned word",
        r"\banew\b|\bany more\b|\b[Mm]end(s|ed|ing)?\b|\bat hand\b|\bfor want of\b|\bin good order\b",
    ),
    ("on its way: write in flight", r"\bon (its|their) way\b"),
    (
        "is to be: write must be, will be",
        r"\b(is|are|was|were) to be\b",
    ),
    (
        "Else, done with, without a word",
        r"(^|[.;:] )Else\b|\bmade up for\b|\bdone with\b|\bby that\b|\b(last|without a|another) word\b",
    ),
];

const EXTENSIONS: [&str; 8] = ["md", "rs", "sql", "toml", "yml", "yaml", "sh", "proto"];

/// The files with text below a folder. Leaves out build output, downloaded packages, folders whose
/// names begin with a dot, and fuzzing corpora.
fn texts(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder of the repository") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let extension = path.extension().unwrap_or_default().to_string_lossy();
        if path.is_dir() {
            if !["target", "node_modules", "corpus"].contains(&&*name) && !name.starts_with('.') {
                found.extend(texts(&path));
            }
        } else if EXTENSIONS.contains(&&*extension) && name != "prose.rs" {
            found.push(path);
        }
    }
    found
}

/// The lines of a file that people read as prose, each with its number: Markdown outside of code,
/// comments, and string literals with at least two spaces.
fn prose(path: &Path, text: &str) -> Vec<(usize, String)> {
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    let lines = text.lines().enumerate().map(|(n, line)| (n + 1, line));
    if extension == "md" {
        let mut is_code = false;
        let is_prose = |(_, line): &(usize, &str)| {
            let is_fence = line.starts_with("```");
            is_code ^= is_fence;
            !is_code && !is_fence
        };
        let lines = lines.filter(is_prose);
        return lines.map(|(n, line)| (n, line.to_owned())).collect();
    }
    let mark = match &*extension {
        "rs" | "proto" => "//",
        "sql" => "--",
        _ => "#",
    };
    let comment = |line: &str| {
        let (_, comment) = line.split_once(mark)?;
        Some(comment.trim_start_matches(['/', '!', ' ', '#']).to_owned())
    };
    let mut found = Vec::new();
    for (n, line) in lines {
        if let Some(comment) = comment(line) {
            found.push((n, comment));
        } else if extension == "rs" {
            let texts = line.split('"').skip(1).step_by(2);
            let texts = texts.filter(|text| text.matches(' ').count() >= 2);
            found.extend(texts.map(|text| (n, text.to_owned())));
        }
    }
    found
}

#[test]
fn prose_is_plain_english() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let phrases = PHRASES.map(|(what, pattern)| (what, Regex::new(pattern).expect("a pattern")));
    let (mut words, mut hits, mut shown) = (0, 0, String::new());
    for path in texts(root) {
        let text = std::fs::read_to_string(&path).expect("a text in UTF-8");
        let name = path.strip_prefix(root).unwrap_or(&path).display();
        for (n, line) in prose(&path, &text) {
            words += line.split_whitespace().count();
            for (what, phrase) in &phrases {
                for found in phrase.find_iter(&line) {
                    // A phrase that begins with "so" is no hit if "as" or "that" completes its comparison.
                    let rest = line[found.end()..].trim_start();
                    let is_comparison = rest.starts_with("as ") || rest.starts_with("that ");
                    if !(what.starts_with("so ") && is_comparison) {
                        hits += 1;
                        writeln!(shown, "{name}:{n}: {line}\n    {what}").expect("a String");
                    }
                }
            }
        }
    }
    assert!(words > 100_000, "only {words} words were recognised");
    let rate = 1_000.0 * f64::from(hits) / words as f64;
    assert!(
        rate <= ALLOWED,
        "{shown}{hits} phrases in {words} words: {rate:.2} per 1,000, and {ALLOWED} are allowed"
    );
}

#[test]
fn phrases_are_searched_in_prose_comments_and_messages_but_not_in_code() {
    let found = |name: &str, text: &str| {
        let lines = prose(Path::new(name), text);
        lines
            .into_iter()
            .map(|(_, line)| line)
            .collect::<Vec<_>>()
            .join("|")
    };
    assert_eq!(found("a.md", "one\n```\ncode\n```\ntwo"), "one|two");
    assert_eq!(
        found("a.rs", "/// One thing.\nlet x = 1; // two"),
        "One thing.|two"
    );
    let literals = r#"f("too short", "long enough to read")"#;
    assert_eq!(found("a.rs", literals), "long enough to read");
    assert_eq!(found("a.sql", "select 1 -- a comment"), "a comment");
    assert_eq!(found("a.toml", "a = 1\n# a comment"), "a comment");
}

//! Shows a file's path in a message, unless the value seems to be something else by mistake: the
//! content of the file, a password or a URL.

use std::path::Path;

/// Maximum length in bytes of a path that is shown. A longer value could be a key in base64.
const MAX_BYTES: usize = 200;

/// Returns the path, or a placeholder if the value does not look like a path.
pub fn shown_path(path: &Path) -> String {
    match path.to_str() {
        Some(text) if looks_like_a_path(text) => text.to_owned(),
        _ => "(a value that does not look like a path)".to_owned(),
    }
}

/// Whether the text has at most [`MAX_BYTES`] bytes, contains only characters that are usual in paths, and
/// starts like a path or ends with a file extension. So a text with characters of JSON, PEM, a URL or a
/// connection string is not shown.
fn looks_like_a_path(text: &str) -> bool {
    let is_allowed = |c: char| c.is_alphanumeric() || " ./_-+~,".contains(c);
    let has_extension = || {
        text.rsplit_once('.')
            .is_some_and(|(stem, extension)| !stem.is_empty() && (2..=5).contains(&extension.len()))
    };
    text.len() <= MAX_BYTES
        && text.chars().all(is_allowed)
        && !text.contains("//")
        && !text.contains("----")
        && (text.starts_with(['/', '.', '~']) || has_extension())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_shown_and_the_content_of_a_file_is_not() {
        for path in [
            "/etc/ssl/ca.pem",
            "./relay.toml",
            "ca.pem",
            "certs/my ca.crt",
        ] {
            assert_eq!(shown_path(Path::new(path)), path);
        }
        for content in [
            "{\"type\": \"service_account\"}",
            "-----BEGIN PRIVATE KEY-----\nMIIE",
            "hunter2",
            "postgres://u:hunter2@h/d",
            "host=h password=hunter2",
            "*:*:*:*:hunter2",
            &"MIIEvQ/".repeat(100),
        ] {
            assert!(
                !shown_path(Path::new(content)).contains(content),
                "{content}"
            );
        }
    }
}

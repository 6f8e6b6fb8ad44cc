//! Checks every link of the built website: the linked file must exist and contain the anchor.
//!
//! The check reads the HTML that readers get, so it also finds links that mdBook broke. Links to other websites
//! are not checked.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::{files_below, normal, read};

/// Checks all links below `website`, and returns how many lead to a page or file of this website.
pub(crate) fn check(website: &Path) -> Result<usize, String> {
    let mut pages = BTreeMap::new();
    for file in files_below(website)? {
        if file.extension().is_some_and(|e| e == "html") {
            let html = read(&file)?;
            pages.insert(file, html);
        }
    }
    let anchors: BTreeMap<&Path, BTreeSet<&str>> = pages
        .iter()
        .map(|(page, html)| (page.as_path(), values(html, "id").collect()))
        .collect();
    let (mut checked, mut broken) = (0, Vec::new());
    for (page, html) in &pages {
        // Skip mdBook's 404 page, because `target` does not support the tag `<base href="/">` with which
        // browsers resolve its links.
        if page.ends_with("404.html") {
            continue;
        }
        for link in values(html, "href").chain(values(html, "src")) {
            let Some((file, anchor)) = target(website, page, link) else {
                continue;
            };
            checked += 1;
            let found = match anchors.get(file.as_path()) {
                Some(ids) => anchor.is_empty() || ids.contains(anchor),
                None => file.is_file(),
            };
            if !found {
                let page = page.strip_prefix(website).unwrap_or(page);
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    if broken.is_empty() {
        return Ok(checked);
    }
    Err(format!("links that lead nowhere:\n{}", broken.join("\n")))
}

/// Returns the file and the anchor that a link leads to; `None` for a link to another website.
fn target<'a>(website: &Path, page: &Path, link: &'a str) -> Option<(PathBuf, &'a str)> {
    let other = ["http:", "https:", "mailto:", "data:", "javascript:"];
    if other.iter().any(|scheme| link.starts_with(scheme)) {
        return None;
    }
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    if path.is_empty() {
        return Some((page.to_owned(), anchor));
    }
    let inside = page.strip_prefix(website).ok()?.parent()?.join(path);
    let mut file = website.join(normal(&inside));
    if file.is_dir() {
        file.push("index.html");
    }
    Some((file, anchor))
}

/// Iterates over the values of `attribute` in all tags of a page.
fn values<'a>(html: &'a str, attribute: &'a str) -> impl Iterator<Item = &'a str> {
    html.split('<')
        .skip(1)
        .filter_map(|tag| tag.split('>').next())
        .filter_map(move |tag| {
            let rest = tag.split_once(&format!(" {attribute}=\""))?.1;
            rest.split('"').next()
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn website(pages: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, html) in pages {
            crate::write(&folder.path().join(name), html).expect("a page");
        }
        folder
    }

    #[test]
    fn links_to_pages_folders_files_and_anchors_are_found() {
        let website = website(&[
            (
                "index.html",
                "<a href=\"a/b.html#x\"></a><a href=\"a/\"></a><a href=\"https://example.com\"></a>",
            ),
            (
                "a/index.html",
                "<img src=\"../c.png\"><a href=\"#own\"></a><p id=\"own\">",
            ),
            ("a/b.html", "<h2 class=\"y\" id=\"x\">"),
            ("c.png", ""),
        ]);
        assert_eq!(check(website.path()), Ok(4));
    }

    #[test]
    fn a_missing_page_file_or_anchor_is_named_with_the_page_that_links_to_it() {
        for link in ["b.html", "a.html#y", "#y", "c.png", "../d/"] {
            let html = format!("<p id=\"x\"><a href=\"{link}\">");
            let website = website(&[("a.html", &html)]);
            let error = check(website.path()).expect_err("a broken link");
            assert!(error.contains(&format!("a.html: {link}")), "{error}");
        }
    }
}

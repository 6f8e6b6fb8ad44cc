//! `cargo xtask book`: builds a website from the documents with mdBook, with search, and checks
//! every link of the website.
//!
//! mdBook needs all pages in one folder, and a list of the pages. This program creates both from
//! the repository. Pages keep their relative paths, so links between them work. Files that a page
//! links to are copied too. The list comes from `docs/README.md`, so there is no second list to
//! maintain.
//!
//! Not here: checking links to other websites, which would need a network. `links.rs` checks all
//! other links.

mod links;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::Parser;
use xtask::step;

/// Arguments of `cargo` with which `--fetch` installs mdBook, without the optional features for
/// watching and serving.
const INSTALL: [&str; 8] = [
    "install",
    "--quiet",
    "--locked",
    "--debug",
    "--no-default-features",
    "--features",
    "search",
    "mdbook@0.5.4",
];

/// Pages outside `docs/`, in the order in which the contents list them.
const PROJECT_PAGES: [&str; 7] = [
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "examples/producers/README.md",
    "bench/README.md",
    "pubsub-emulator/README.md",
];

#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask book",
    about = "The documents as a website with search"
)]
struct BookArgs {
    /// First build mdBook from crates.io if it is missing, into ~/.cache/postrider-tools
    #[arg(long)]
    fetch: bool,
}

fn main() -> ExitCode {
    match run(&BookArgs::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nbook: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &BookArgs) -> Result<(), String> {
    let Some(mdbook) = mdbook(args.fetch) else {
        println!("SKIPPED: the book (cargo xtask book --fetch builds mdBook)");
        return Ok(());
    };
    let folder = step::target_folder().join("book");
    // Remove the pages of an earlier run, because they could hide a broken link.
    let _ = std::fs::remove_dir_all(&folder);
    let mut book = Book {
        source: folder.join("src"),
        contents: String::from("# Contents\n\n[Postrider](index.md)\n"),
        listed: BTreeSet::new(),
    };
    book.gather()?;
    copy(
        &step::root().join("docs/book.toml"),
        &folder.join("book.toml"),
    )?;
    let mut build = Command::new(mdbook);
    build.arg("build").arg(&folder);
    step::run(build)?;
    let checked = links::check(&folder.join("html"))?;
    println!(
        "{} pages, {checked} links: {}",
        book.listed.len(),
        folder.join("html/index.html").display()
    );
    Ok(())
}

/// Finds the program `mdbook`, on `PATH` or in the tools folder. With `fetch`, builds it first if
/// it is missing.
fn mdbook(fetch: bool) -> Option<PathBuf> {
    let on_path = std::env::var_os("PATH").unwrap_or_default();
    let fetched = step::tools_folder().map(|tools| tools.join("mdbook-0.5.4"));
    let find = || {
        std::env::split_paths(&on_path)
            .chain(fetched.iter().map(|folder| folder.join("bin")))
            .map(|folder| folder.join("mdbook"))
            .find(|program| program.is_file())
    };
    if let (None, Some(folder), true) = (find(), &fetched, fetch) {
        let mut install = step::cargo(&INSTALL);
        install.arg("--root").arg(folder);
        // If the installation fails, for example without a network, skip the book, as without `--fetch`.
        if let Err(error) = step::run(install) {
            println!("{error}");
        }
    }
    find()
}

struct Book {
    /// The folder where the pages are gathered. Below it, they have the same paths as in the
    /// repository.
    source: PathBuf,
    /// The text of SUMMARY.md.
    contents: String,
    /// The pages that are already in the contents, as paths from the root of the repository.
    listed: BTreeSet<PathBuf>,
}

impl Book {
    fn gather(&mut self) -> Result<(), String> {
        self.page(Path::new("README.md"))?;
        self.documents()?;
        self.contents.push_str("\n# Project\n\n");
        for page in PROJECT_PAGES {
            self.chapter(Path::new(page), 0)?;
        }
        for page in markdown_below(&step::root().join("docs"))? {
            let page = page.strip_prefix(step::root()).map_err(|e| e.to_string())?;
            if !self.listed.contains(page) {
                return Err(format!("docs/README.md does not list {}", page.display()));
            }
        }
        write(&self.source.join("SUMMARY.md"), &self.contents)
    }

    /// Adds the parts and pages that `docs/README.md` names, in the order in which it names them.
    fn documents(&mut self) -> Result<(), String> {
        let text = read(&step::root().join("docs/README.md"))?;
        self.contents.push_str("\n---\n\n");
        self.chapter(Path::new("docs/README.md"), 0)?;
        for line in text.lines() {
            if let Some((part, _)) = line.strip_prefix("**").and_then(|l| l.split_once("**")) {
                let _ = write!(self.contents, "\n# {part}\n\n");
            }
            for target in targets(line) {
                let page = normal(&Path::new("docs").join(target));
                if step::root().join(&page).is_dir() {
                    self.folder(&page)?;
                } else if page.extension().is_some_and(|e| e == "md") && page.starts_with("docs") {
                    self.chapter(&page, 0)?;
                }
            }
        }
        Ok(())
    }

    /// Adds a page that lists the pages of the folder, and adds these pages as its subpages.
    fn folder(&mut self, folder: &Path) -> Result<(), String> {
        let pages = markdown_below(&step::root().join(folder))?;
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let title = match name.as_ref() {
            "adr" => "Decision records".to_owned(),
            "errors" => "Error codes".to_owned(),
            other => {
                return Err(format!(
                    "docs/README.md links to the folder {other}: give it a title"
                ));
            }
        };
        let mut index = format!("# {title}\n\n");
        let own = folder.join("index.md");
        let _ = writeln!(self.contents, "- [{title}]({})", own.display());
        self.listed.insert(own.clone());
        for page in pages {
            let page = page.strip_prefix(step::root()).map_err(|e| e.to_string())?;
            self.chapter(page, 1)?;
            let file = page.file_name().unwrap_or_default().to_string_lossy();
            let _ = writeln!(index, "- [{}]({file})", self.title(page)?);
        }
        write(&self.source.join(own), &index)
    }

    fn chapter(&mut self, page: &Path, depth: usize) -> Result<(), String> {
        if self.listed.contains(page) {
            return Ok(());
        }
        self.page(page)?;
        let title = self.title(page)?;
        let indent = "  ".repeat(depth);
        let path_in_book = in_book(page);
        let _ = writeln!(
            self.contents,
            "{indent}- [{title}]({})",
            path_in_book.display()
        );
        Ok(())
    }

    fn title(&self, page: &Path) -> Result<String, String> {
        let text = read(&step::root().join(page))?;
        text.lines()
            .find_map(|line| line.strip_prefix("# "))
            .map(|title| title.replace('`', ""))
            .ok_or_else(|| format!("{} has no heading", page.display()))
    }

    /// Copies a page and the files that it links to, and creates a page for each folder that it
    /// links to.
    fn page(&mut self, page: &Path) -> Result<(), String> {
        self.listed.insert(page.to_owned());
        let from = step::root().join(page);
        let text = read(&from)?;
        let staged = text
            .replace("README.md)", "index.md)")
            .replace("README.md#", "index.md#");
        write(&self.source.join(in_book(page)), &staged)?;
        for target in text.lines().flat_map(targets) {
            let linked = normal(&page.parent().unwrap_or(Path::new("")).join(target));
            let from = step::root().join(&linked);
            let to = self.source.join(&linked);
            if from.is_dir() {
                self.listing(&linked)?;
            } else if !to.exists() && linked.extension().is_none_or(|e| e != "md") {
                copy(&from, &to)?;
            }
        }
        Ok(())
    }

    /// Copies the files of a folder outside `docs/`, and creates a page that lists them. Links to the
    /// folder lead to this page.
    fn listing(&self, folder: &Path) -> Result<(), String> {
        let to = self.source.join(folder);
        let index = to.join("index.html");
        if index.exists() || folder.starts_with("docs") {
            return Ok(());
        }
        let title = folder.display();
        let mut html = format!("<!DOCTYPE html><title>{title}</title><h1>{title}</h1><ul>");
        for file in files_below(&step::root().join(folder))? {
            let file = file
                .strip_prefix(step::root().join(folder))
                .map_err(|e| e.to_string())?;
            copy(&step::root().join(folder).join(file), &to.join(file))?;
            let name = file.display();
            let _ = write!(html, "<li><a href=\"{name}\">{name}</a>");
        }
        write(&index, &(html + "</ul>"))
    }
}

/// Returns the path of a page in the book. A README becomes `index.md`, because mdBook expects
/// this name for the first page of a folder.
fn in_book(page: &Path) -> PathBuf {
    if page.ends_with("README.md") {
        page.with_file_name("index.md")
    } else {
        page.to_owned()
    }
}

/// Iterates over the paths of those links on a line of Markdown that lead to files, without their
/// anchors.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| rest.split([')', '#']).next())
        .filter(|target| !target.is_empty() && !target.contains("://"))
}

/// Resolves `.` and `..` in a path.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(normal.pop()),
            Component::Normal(name) => normal.push(name),
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    normal
}

fn markdown_below(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let mut pages = files_below(folder)?;
    pages.retain(|page| page.extension().is_some_and(|e| e == "md"));
    Ok(pages)
}

/// Lists all files in a folder and in its subfolders, in alphabetical order.
fn files_below(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let cannot = |e: std::io::Error| format!("cannot read {}: {e}", folder.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(cannot)? {
        let path = entry.map_err(cannot)?.path();
        if path.is_dir() {
            files.extend(files_below(&path)?);
        } else {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    make_parent(path)?;
    std::fs::write(path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))
}

fn copy(from: &Path, to: &Path) -> Result<(), String> {
    make_parent(to)?;
    std::fs::copy(from, to)
        .map(drop)
        .map_err(|e| format!("cannot copy {} to {}: {e}", from.display(), to.display()))
}

fn make_parent(path: &Path) -> Result<(), String> {
    let parent = path.parent().unwrap_or(Path::new(""));
    std::fs::create_dir_all(parent).map_err(|e| format!("cannot make {}: {e}", parent.display()))
}

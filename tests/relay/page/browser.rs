//! Drives Chromium through its debugging protocol, over a pipe: sets the size of the screen and the colour
//! scheme, presses keys, and evaluates expressions on the page.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::{profile_folder, program};

/// How long the tests wait for an answer of the browser, or for a change of the page. Generous, because
/// test machines may be busy.
const PATIENCE: Duration = Duration::from_secs(60);

/// Shell script that starts the browser. The debugging protocol uses the file descriptors 3 and 4, so the
/// script connects them to the pipes of standard input and output.
const SHELL: &str = "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1";

/// A browser with one page. It is killed when dropped.
pub(super) struct Browser {
    child: Child,
    input: ChildStdin,
    answers: Receiver<Value>,
    profile: PathBuf,
    next_id: u64,
    session: Option<String>,
}

/// The size of a screen, in CSS pixels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Screen {
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) is_phone: bool,
}

impl Browser {
    /// Starts a browser. Returns `None` if Chromium is not installed.
    pub(super) fn start() -> Option<Self> {
        let program = program();
        Command::new(&program).arg("--version").output().ok()?;
        let profile = profile_folder();
        let mut child = Command::new("sh")
            .args(["-c", SHELL])
            .arg(program)
            .args(["--headless=new", "--no-sandbox", "--disable-gpu"])
            .args(["--no-first-run", "--remote-debugging-pipe"])
            .arg(format!("--user-data-dir={}", profile.display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for message in output.split(0).map_while(Result::ok) {
                let message = serde_json::from_slice(&message).unwrap_or(Value::Null);
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        let mut browser = Self {
            input: child.stdin.take().unwrap(),
            child,
            answers,
            profile,
            next_id: 0,
            session: None,
        };
        let page = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": page["targetId"], "flatten": true});
        let attached = browser.call("Target.attachToTarget", attach);
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        let focus = json!({"enabled": true});
        browser.call("Emulation.setFocusEmulationEnabled", focus);
        Some(browser)
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        self.next_id += 1;
        let mut request = json!({"id": self.next_id, "method": method, "params": params});
        if let Some(session) = &self.session {
            request["sessionId"] = json!(session);
        }
        let mut bytes = request.to_string().into_bytes();
        bytes.push(0);
        self.input.write_all(&bytes).unwrap();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let answer = self.answers.recv_timeout(left);
            let mut answer = answer.unwrap_or_else(|_| panic!("no answer to {request}"));
            if answer["id"] == self.next_id {
                assert!(answer["error"].is_null(), "{request}: {answer}");
                return answer["result"].take();
            }
        }
    }

    pub(super) fn set_screen(&mut self, screen: Screen) {
        let metrics = json!({
            "width": screen.width, "height": screen.height,
            "deviceScaleFactor": 1, "mobile": screen.is_phone,
        });
        self.call("Emulation.setDeviceMetricsOverride", metrics);
    }

    /// Sets the colour scheme that the user prefers: `light` or `dark`.
    pub(super) fn prefer_scheme(&mut self, scheme: &str) {
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", media);
    }

    /// Opens `url`, and waits until the expression `is_loaded` is true.
    pub(super) fn open(&mut self, url: &str, is_loaded: &str) {
        self.call("Page.navigate", json!({"url": url}));
        self.wait_for(is_loaded);
    }

    /// Evaluates a JavaScript expression on the page.
    pub(super) fn value_of(&mut self, expression: &str) -> Value {
        let evaluate = json!({"expression": expression, "returnByValue": true});
        let mut answer = self.call("Runtime.evaluate", evaluate);
        let exception = &answer["exceptionDetails"];
        assert!(exception.is_null(), "{expression}: {exception}");
        answer["result"]["value"].take()
    }

    /// Waits until a JavaScript expression on the page is true.
    pub(super) fn wait_for(&mut self, expression: &str) {
        let deadline = Instant::now() + PATIENCE;
        while self.value_of(expression) != json!(true) {
            let text = "document.body ? document.body.innerText : ''";
            assert!(
                Instant::now() < deadline,
                "still not {expression} on\n{}",
                self.value_of(text)
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Writes a picture of the screen to the file `path`, as PNG.
    pub(super) fn screenshot(&mut self, path: &Path) {
        let captured = self.call("Page.captureScreenshot", json!({"format": "png"}));
        let base64 = captured["data"].as_str().unwrap();
        std::fs::write(path, STANDARD.decode(base64).unwrap()).unwrap();
    }

    /// Presses a key: `Tab`, `Enter` or `Space`.
    pub(super) fn press(&mut self, key: &str) {
        let (name, code, text) = match key {
            "Tab" => ("Tab", 9, ""),
            "Enter" => ("Enter", 13, "\r"),
            "Space" => (" ", 32, " "),
            _ => panic!("unknown key {key}"),
        };
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({
                "type": kind, "key": name, "code": key, "windowsVirtualKeyCode": code,
            });
            if kind == "keyDown" && !text.is_empty() {
                event["text"] = json!(text);
            }
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// Types a text into the focused field.
    pub(super) fn write(&mut self, text: &str) {
        self.call("Input.insertText", json!({"text": text}));
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.profile);
    }
}

//! Reads the files with which operators deploy Postrider.

use std::path::{Path, PathBuf};

use saphyr::{LoadableYamlNode, Scalar, Yaml};
use serde_json::{Map, Value};

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub(crate) fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn below(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder of the repository") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            // Skip the folder in which Terraform keeps its providers.
            if !path.ends_with(".terraform") {
                below(&path, found);
            }
        } else {
            found.push(path);
        }
    }
}

/// Every file of `deploy/`, the workflows, and the compose file at the root.
pub(crate) fn all() -> Vec<PathBuf> {
    let mut found = vec![root().join("docker-compose.yml")];
    below(&root().join("deploy"), &mut found);
    below(&root().join(".github"), &mut found);
    found.sort();
    found
}

/// Every file with one of these extensions, except Helm templates, which are YAML only after Helm
/// has filled them in.
pub(crate) fn with_extension(extensions: &[&str]) -> Vec<PathBuf> {
    let is_one = |path: &PathBuf| {
        let extension = path.extension().unwrap_or_default().to_string_lossy();
        let is_template = path.iter().any(|part| part == "templates");
        extensions.contains(&&*extension) && !is_template
    };
    all().into_iter().filter(is_one).collect()
}

/// The documents of all YAML files, each with the path of its file. Patches inside a kustomization
/// count as documents too.
pub(crate) fn documents() -> Vec<(PathBuf, Value)> {
    let mut found = Vec::new();
    for path in with_extension(&["yaml", "yml"]) {
        for document in yaml(&path, &read(&path)) {
            for patch in document["patches"].as_array().into_iter().flatten() {
                let text = patch["patch"].as_str().unwrap_or_default();
                let patches = yaml(&path, text);
                found.extend(patches.into_iter().map(|patch| (path.clone(), patch)));
            }
            found.push((path.clone(), document));
        }
    }
    found
}

pub(crate) fn yaml(path: &Path, text: &str) -> Vec<Value> {
    let documents = Yaml::load_from_str(text);
    let documents = documents.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    documents.iter().map(json).collect()
}

fn json(node: &Yaml) -> Value {
    match node {
        Yaml::Value(scalar) => match scalar {
            Scalar::Null => Value::Null,
            Scalar::Boolean(value) => (*value).into(),
            Scalar::Integer(value) => (*value).into(),
            Scalar::FloatingPoint(value) => value.into_inner().into(),
            Scalar::String(value) => value.to_string().into(),
        },
        Yaml::Sequence(items) => items.iter().map(json).collect(),
        Yaml::Mapping(entries) => {
            let mut object = Map::new();
            for (key, value) in entries {
                let value = json(value);
                match (key.as_str(), value) {
                    (Some("<<"), Value::Object(merged)) => object.extend(merged),
                    (Some(key), value) => {
                        object.insert(key.to_owned(), value);
                    }
                    (None, _) => panic!("a key that is no text: {key:?}"),
                }
            }
            object.into()
        }
        Yaml::Tagged(_, node) => json(node),
        other => panic!("not expected in YAML: {other:?}"),
    }
}

/// Calls `see` with every object inside a document.
pub(crate) fn each_object(value: &Value, see: &mut impl FnMut(&Map<String, Value>)) {
    match value {
        Value::Object(object) => {
            see(object);
            for value in object.values() {
                each_object(value, see);
            }
        }
        Value::Array(items) => {
            for item in items {
                each_object(item, see);
            }
        }
        _ => {}
    }
}

/// The containers with the name `postrider` in all documents, each with the path of its file.
pub(crate) fn containers() -> Vec<(PathBuf, Value)> {
    let mut found = Vec::new();
    for (path, document) in documents() {
        each_object(&document, &mut |object| {
            for container in object
                .get("containers")
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
            {
                if container["name"] == "postrider" {
                    found.push((path.clone(), container.clone()));
                }
            }
        });
    }
    found
}

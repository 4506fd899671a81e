//! Whole sources: made here part by part, opened as a user gives them.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::{Pick, Source, SourceError};
use super::*;

/// A tar member: a file, or a link if it has a target.
fn member(name: &str, content: &[u8], target: Option<&str>) -> Vec<u8> {
    let mut header = [0; 512];
    let mut put = |at: usize, text: &[u8]| header[at..at + text.len()].copy_from_slice(text);
    put(0, name.as_bytes());
    put(100, b"0000644\0");
    put(124, format!("{:011o}\0", content.len()).as_bytes());
    put(156, if target.is_some() { b"2" } else { b"0" });
    put(157, target.unwrap_or("").as_bytes());
    put(257, b"ustar\x0000");
    put(148, b"        ");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut bytes = header.to_vec();
    bytes.extend(content);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

/// An image in parts, as files by their paths.
#[derive(Default)]
struct Parts(BTreeMap<String, Vec<u8>>);

impl Parts {
    fn add(&mut self, bytes: &[u8]) -> Value {
        let digest = Digest::of(bytes);
        self.0.insert(blob(&digest), bytes.to_vec());
        json!({ "digest": digest.to_string(), "size": bytes.len() })
    }

    fn manifest(&mut self, platform: &Value, config: &Value) -> Value {
        let mut file = platform.clone();
        file["config"] = config.clone();
        let config = self.add(file.to_string().as_bytes());
        let mut layer = self.add(b"a layer");
        layer["mediaType"] = "application/vnd.oci.image.layer.v1.tar+gzip".into();
        let manifest = json!({ "schemaVersion": 2, "config": config, "layers": [layer] }).to_string();
        self.add(manifest.as_bytes())
    }

    fn index(&mut self, manifests: &[Value]) {
        let index = json!({ "schemaVersion": 2, "manifests": manifests }).to_string();
        self.0.insert("index.json".to_owned(), index.into_bytes());
        self.0.insert("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec());
    }

    /// As a directory and as an archive.
    fn open(&self, reference: Option<&str>) -> Result<Source, SourceError> {
        let dir = tempfile::tempdir().unwrap();
        let mut archive = Vec::new();
        for (name, bytes) in &self.0 {
            let path = dir.path().join("layout").join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
            archive.extend(member(name, bytes, None));
        }
        archive.resize(archive.len() + 1024, 0);
        std::fs::write(dir.path().join("archive.tar"), archive).unwrap();
        let open = |name: &str| {
            let path = dir.path().join(name);
            super::super::open(Pick { path: &path, reference }, &mut |_| ())
        };
        let (a, b) = (open("layout"), open("archive.tar"));
        assert_eq!(a.is_ok(), b.is_ok(), "{a:?} {b:?}");
        if let (Ok(a), Ok(b)) = (&a, &b) {
            assert_eq!((&a.digest, &a.config, a.length()), (&b.digest, &b.config, b.length()));
        }
        b
    }

    fn why(&self, reference: Option<&str>) -> String {
        self.open(reference).unwrap_err().to_string()
    }
}

fn amd64() -> Value {
    json!({ "os": "linux", "architecture": "amd64" })
}

#[test]
fn an_oci_image_is_found_and_its_configuration_read() {
    let mut parts = Parts::default();
    let config = json!({
        "Entrypoint": ["/init"], "Cmd": null, "Env": ["PATH=/bin", "EMPTY="], "User": "app", "WorkingDir": "srv",
        "Labels": { "a": "b" }, "ExposedPorts": { "80/tcp": {} },
    });
    let mut manifest = parts.manifest(&amd64(), &config);
    manifest["annotations"] = json!({ "io.containerd.image.name": "docker.io/library/debian:12" });
    parts.index(&[manifest.clone()]);
    let source = parts.open(None).unwrap();
    assert_eq!((source.kind, source.is_layered(), source.length()), (crate::image::record::Kind::Oci, true, Some(7)));
    assert_eq!(source.digest.unwrap().to_string(), manifest["digest"]);
    assert_eq!(source.name.as_deref(), Some("debian:12"));
    assert_eq!(source.config.entrypoint, ["/init"]);
    assert!(source.config.cmd.is_empty());
    assert_eq!((source.config.user.as_deref(), source.config.workdir.as_deref()), (Some("app"), Some("/srv")));
    assert_eq!(source.config.labels["a"], "b");
}

#[test]
fn the_image_for_this_machine_is_chosen_also_behind_an_index() {
    let mut parts = Parts::default();
    let arm = json!({ "os": "linux", "architecture": "arm64" });
    let mut ours = parts.manifest(&amd64(), &json!({}));
    ours["platform"] = amd64();
    let mut other = parts.manifest(&arm, &json!({}));
    other["platform"] = arm.clone();
    let mut signature = parts.add(b"{}");
    signature["platform"] = json!({ "os": "unknown", "architecture": "unknown" });
    let inner = json!({ "manifests": [other, ours, signature] }).to_string();
    let mut inner = parts.add(inner.as_bytes());
    inner["mediaType"] = "application/vnd.oci.image.index.v1+json".into();
    inner["annotations"] = json!({ "org.opencontainers.image.ref.name": "latest" });
    parts.index(&[inner]);
    let source = parts.open(None).unwrap();
    assert_eq!(source.digest.unwrap().to_string(), ours["digest"]);
    assert_eq!((source.reference.as_deref(), source.name.as_deref()), (Some("latest"), Some("archive")));
    // Only the configuration says for which machine it is.
    let mut parts = Parts::default();
    let manifest = parts.manifest(&arm, &json!({}));
    parts.index(&[manifest]);
    assert!(parts.why(None).contains("for linux/arm64, not for linux/amd64"));
    let mut parts = Parts::default();
    let mut manifest = parts.manifest(&arm, &json!({}));
    manifest["platform"] = arm;
    parts.index(&[manifest]);
    let why = parts.why(None);
    assert!(why.contains("no image for linux/amd64; there are: sha256:") && why.contains("(linux/arm64)"), "{why}");
}

#[test]
fn of_several_images_one_is_asked_for() {
    let mut parts = Parts::default();
    let mut one = parts.manifest(&amd64(), &json!({ "User": "1" }));
    one["annotations"] = json!({ "org.opencontainers.image.ref.name": "one" });
    let mut two = parts.manifest(&amd64(), &json!({ "User": "2" }));
    two["annotations"] = json!({ "org.opencontainers.image.ref.name": "quay.io/x/two:3" });
    parts.index(&[one, two]);
    let why = parts.why(None);
    assert!(why.contains("several images") && why.contains("--ref"), "{why}");
    for (reference, user) in [("one", "1"), ("quay.io/x/two:3", "2"), ("3", "2")] {
        assert_eq!(parts.open(Some(reference)).unwrap().config.user.as_deref(), Some(user));
    }
    assert!(parts.why(Some("three")).contains("no image \"three\"; there are: one, quay.io/x/two:3"));
}

#[test]
fn what_an_oci_image_lacks_or_claims_falsely_is_told() {
    let whole = || {
        let mut parts = Parts::default();
        let manifest = parts.manifest(&amd64(), &json!({}));
        parts.index(&[manifest]);
        parts
    };
    // Each blob in turn missing, and changed.
    let blobs: Vec<String> = whole().0.into_keys().filter(|name| name.starts_with("blobs/")).collect();
    assert_eq!(blobs.len(), 3);
    for name in &blobs {
        let mut parts = whole();
        parts.0.remove(name);
        let why = parts.why(None);
        assert!(why.contains(name) && why.contains("missing"), "{why}");
        let mut parts = whole();
        parts.0.get_mut(name).unwrap().push(b' ');
        let why = parts.why(None);
        assert!(why.contains(name) && (why.contains("its digest is") || why.contains("bytes, not")), "{why}");
    }
    let with = |index: Value| {
        let mut parts = whole();
        parts.0.insert("index.json".to_owned(), index.to_string().into_bytes());
        parts.why(None)
    };
    assert!(with(json!({ "manifests": [] })).contains("there are: none"));
    assert!(
        with(json!({ "manifests": [{ "digest": "sha256:../../etc", "size": 1 }] })).contains("not a sha256 digest")
    );
    assert!(with(json!("x")).contains("not valid"));
    let mut parts = Parts::default();
    let manifest = json!({ "config": { "mediaType": "application/vnd.cncf.helm.config.v1+json", "digest": "sha256:0", "size": 1 } });
    let manifest = parts.add(manifest.to_string().as_bytes());
    parts.index(&[manifest]);
    assert!(parts.why(None).contains("no container image"));
    let mut parts = Parts::default();
    let manifest = parts.manifest(&amd64(), &json!({ "Env": ["A\0=b"] }));
    parts.index(&[manifest]);
    assert!(parts.why(None).contains("NUL byte"));
    let mut parts = Parts::default();
    let manifest = parts.manifest(&amd64(), &json!({ "Env": ["novalue"] }));
    parts.index(&[manifest]);
    assert!(parts.why(None).contains("not NAME=VALUE"));
}

#[test]
fn an_index_within_itself_ends() {
    let mut parts = Parts::default();
    let mut inner = parts.add(br#"{"manifests":[]}"#);
    for _ in 0..10 {
        inner["mediaType"] = "application/vnd.oci.image.index.v1+json".into();
        let outer = json!({ "manifests": [inner] }).to_string();
        inner = parts.add(outer.as_bytes());
    }
    inner["mediaType"] = "application/vnd.oci.image.index.v1+json".into();
    parts.index(&[inner]);
    assert!(parts.why(None).contains("without end"));
}

fn docker(layers: &[(&str, &[u8])], plain: &[&[u8]]) -> Parts {
    let mut parts = Parts::default();
    let hex = "a".repeat(64);
    let diff_ids: Vec<String> = plain.iter().map(|bytes| Digest::of(bytes).to_string()).collect();
    let config = json!({
        "os": "linux", "architecture": "amd64", "config": { "Cmd": ["sh"] },
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
    });
    parts.0.insert(format!("{hex}.json"), config.to_string().into_bytes());
    let names: Vec<&str> = layers.iter().map(|(name, _)| *name).collect();
    let manifest = json!([{ "Config": format!("{hex}.json"), "RepoTags": ["busybox:1"], "Layers": names }]);
    parts.0.insert("manifest.json".to_owned(), manifest.to_string().into_bytes());
    parts.0.insert("repositories".to_owned(), b"{}".to_vec());
    parts.0.extend(layers.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())));
    parts
}

#[test]
fn what_docker_saves_is_read_and_its_layers_verified() {
    let b = "b".repeat(64);
    let (one, two) = (format!("{b}/layer.tar"), format!("{b}.tar"));
    let source = docker(&[(&one, b"one"), (&two, b"two")], &[b"one", b"two"]).open(None).unwrap();
    assert_eq!((source.kind, source.layers.len()), (crate::image::record::Kind::Docker, 2));
    assert_eq!((source.name.as_deref(), source.config.cmd.as_slice()), (Some("busybox:1"), &["sh".to_owned()][..]));
    let other = docker(&[(&one, b"one"), (&two, b"2")], &[b"one", b"2"]).open(None).unwrap();
    assert_ne!(source.digest, other.digest, "layers are part of the identity");
    let why = docker(&[(&one, b"one")], &[b"another"]).why(None);
    assert!(why.contains("its digest is"), "{why}");
    assert!(docker(&[(&one, b"one")], &[]).why(None).contains("1 layers, but its configuration names 0"));
    assert!(docker(&[(&one, b"one")], &[b"one"]).why(Some("x")).contains("no image \"x\"; there are: busybox:1"));
    // A compressed layer has another digest than what it holds.
    assert!(docker(&[(&one, b"\x1f\x8bzipped")], &[b"plain"]).open(None).is_ok());
}

#[test]
fn links_among_blobs_are_followed_and_have_an_end() {
    let hex = "c".repeat(64);
    let mut archive = member(&format!("{hex}/layer.tar"), b"one", None);
    archive.extend(member("blobs/link", b"", Some(&format!("../{hex}/layer.tar"))));
    archive.extend(member("blobs/loop", b"", Some("loop")));
    archive.extend(member("blobs/out", b"", Some("../../etc/passwd")));
    archive.resize(archive.len() + 1024, 0);
    let file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut &file, &archive).unwrap();
    let Found::Blobs(members) = look(&file, archive.len() as u64).unwrap() else { panic!() };
    let blobs = Blobs::Archive("x".into(), Arc::new(file), members);
    assert_eq!(blobs.read("blobs/link").unwrap(), b"one");
    assert!(blobs.read("blobs/loop").unwrap_err().to_string().contains("without end"));
    assert!(blobs.read("blobs/out").unwrap_err().to_string().contains("missing"));
}

#[test]
fn a_layout_cannot_lead_out_of_its_directory() {
    let dir = tempfile::tempdir().unwrap();
    let layout = dir.path().join("layout");
    std::fs::create_dir(&layout).unwrap();
    std::fs::write(dir.path().join("secret"), "secret").unwrap();
    symlink("../secret", layout.join("index.json")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, layout.join("oci-layout"), Mode::from_raw_mode(0o600)).unwrap();
    let blobs = Blobs::Directory(layout.clone(), File::open(&layout).unwrap().into());
    let out = "it is a link that leads out of the layout; copy what it leads to";
    assert_eq!(blobs.read("index.json").unwrap_err().to_string(), format!("index.json: {out}"));
    assert!(blobs.has("index.json").is_err() && !blobs.has("manifest.json").unwrap());
    symlink("loop", layout.join("loop")).unwrap();
    assert_eq!(blobs.read("loop").unwrap_err().to_string(), "loop: it is a link without end");
    assert!(blobs.read("oci-layout").unwrap_err().to_string().contains("not a file"));
    assert!(blobs.read("../secret").is_err());
}

#[test]
fn what_is_no_source_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let why = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        super::super::open(Pick { path: &path, reference: None }, &mut |_| ()).unwrap_err().to_string()
    };
    assert!(why("empty", b"").contains("it is empty; give a tar"));
    assert!(why("short", b"x").contains("no tar archive (too short)"));
    assert!(why("text", &[b'x'; 600]).contains("no tar archive"));
    for (head, what) in
        [(&b"BZh9"[..], "bzip2"), (b"\x7fELF", "program"), (b"PK\x03\x04", "zip"), (b"QFI\xfb", "qcow2")]
    {
        assert!(why("head", &[head, &[0; 600]].concat()).contains(what));
    }
    let none = super::super::open(Pick { path: &dir.path().join("none"), reference: None }, &mut |_| ());
    assert!(none.unwrap_err().to_string().contains("No such file"));
    let directory = super::super::open(Pick { path: dir.path(), reference: None }, &mut |_| ());
    assert!(directory.unwrap_err().to_string().contains("no oci-layout"));
    let path = dir.path().join("root.tar");
    let mut archive = member("etc/passwd", b"x", None);
    archive.resize(archive.len() + 1024, 0);
    std::fs::write(&path, archive).unwrap();
    let tar = |reference| super::super::open(Pick { path: &path, reference }, &mut |_| ());
    assert_eq!(tar(None).unwrap().name.as_deref(), Some("root"));
    assert!(tar(Some("x")).unwrap_err().to_string().contains("--ref x"));
}

#[test]
fn an_image_from_a_pipe_is_refused_before_it_is_taken_for_a_root() {
    assert_eq!(begins_as_image(&member("blobs/", b"", None)), Ok(true));
    assert_eq!(begins_as_image(&member(&format!("{}/", "a".repeat(64)), b"", None)), Ok(true));
    for root in ["./", "bin/", "usr", "etc/oci-layout"] {
        assert_eq!(begins_as_image(&member(root, b"", None)), Ok(false), "{root}");
    }
    assert!(begins_as_image(&[b'x'; 512]).is_err());
}

proptest! {
    #[test]
    fn arbitrary_files_are_survived(
        names in prop::collection::vec(prop::sample::select(vec!["blobs", "index.json", "oci-layout", "manifest.json", "x"]), 0..5),
        noise in prop::collection::vec(any::<u8>(), 0..700), at in 0usize..1500, cut in 0usize..4000,
    ) {
        let mut bytes: Vec<u8> = names.iter().flat_map(|name| member(name, br#"{"manifests":[]}"#, None)).collect();
        bytes.resize(bytes.len() + 1024, 0);
        for (to, from) in bytes.iter_mut().skip(at).zip(&noise) {
            *to = *from;
        }
        bytes.truncate(cut);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, &bytes).unwrap();
        let _ = super::super::open(Pick { path: file.path(), reference: None }, &mut |_| ());
    }

    #[test]
    fn arbitrary_json_is_survived(text in r#"[\[\]{}:,"a-zA-Z0-9 -]{0,200}"#, docker in any::<bool>()) {
        let mut parts = Parts::default();
        parts.index(&[]);
        let name = if docker { parts.0.remove("index.json"); "manifest.json" } else { "index.json" };
        parts.0.insert(name.to_owned(), text.into_bytes());
        let _ = parts.open(None);
    }
}

//! Kata's layout, with a fake kata-runtime: Kata itself is not used.

use std::fs;
use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE;
use serde_json::{Value, json};
use tonic::Code;

use support::have_root;
use support::kernel::wait_for;
use support::ops::{Ops, assert_code};
use support::path;

/// Behaves like the Go kata-runtime with direct volumes: the sandbox is the first file that is not
/// mountInfo.json, and a resize has no output.
const STAND_IN: &str = r#"
echo "$@" >> "$SEEN"
[ "$1 $3" = "direct-volume --volume-path" ] || exit 1
entry=$DIRECT_VOLUMES/$(printf %s "$4" | base64 -w 0 | tr +/ -_)
sandbox=$(ls -A "$entry" | grep -v '^mountInfo.json$' | sed q)
[ "$sandbox" = c9be9e ] || { echo "no sandbox: $sandbox" >&2; exit 1; }
[ "$2" != stats ] || echo '{"usage":[{"available":7,"total":10,"used":3,"unit":1},{"total":5,"unit":2}],"volume_condition":{"message":"fine"}}'
"#;

struct Kata {
    ops: Ops,
    seen: PathBuf,
    sandboxes: PathBuf,
}

fn with_kata(run: impl FnOnce(&mut Kata)) {
    if !have_root() {
        return;
    }
    let mut ops = Ops::start(&[]);
    assert!(ops.stop().success());
    let (seen, sandboxes) = (ops.scratch().join("seen"), ops.scratch().join("sbs"));
    fs::create_dir(&sandboxes).unwrap();
    fs::write(&seen, "").unwrap();
    let program = ops.program("kata-runtime", STAND_IN);
    let (noted, entries) =
        (format!("SEEN={}", path(&seen)), format!("DIRECT_VOLUMES={}", path(&ops.kata_dir())));
    ops.start_with(&[
        "--layout",
        "kata",
        "--kata-runtime",
        path(&program),
        "--kata-sandbox-dir",
        path(&sandboxes),
        "--cli-env",
        &noted,
        "--cli-env",
        &entries,
        "--collect-every",
        "100ms",
    ]);
    run(&mut Kata { ops, seen, sandboxes });
}

impl Kata {
    fn entry(&self, target: &str) -> PathBuf {
        self.ops.kata_dir().join(URL_SAFE.encode(target))
    }

    /// Claims the volume like a Kata sandbox.
    fn claim(&self, target: &str) {
        fs::write(self.entry(target).join("c9be9e"), "").unwrap();
        fs::create_dir_all(self.sandboxes.join("c9be9e")).unwrap();
    }
}

#[test]
fn kata_entries_contain_no_file_mistaken_for_a_sandbox() {
    with_kata(|kata| {
        let target = kata.ops.target("mount");
        kata.ops.stage(kata.ops.staging(&target)).unwrap();
        kata.ops.stage(kata.ops.staging(&target)).unwrap();
        let files: Vec<_> = fs::read_dir(kata.entry(&target))
            .unwrap()
            .map(|file| file.unwrap().file_name())
            .collect();
        assert_eq!(files, ["mountInfo.json"]);
        let written = fs::read(kata.entry(&target).join("mountInfo.json")).unwrap();
        let expected = json!({"volume-type": "block", "device": kata.ops.device.path(), "fstype": "ext4", "options": ["noatime"]});
        assert_eq!(serde_json::from_slice::<Value>(&written).unwrap(), expected);
        kata.claim(&target);
        kata.ops.unstage(&target).unwrap();
        assert_eq!(fs::read_dir(kata.ops.kata_dir()).unwrap().count(), 0);
        assert_eq!(fs::read_dir(kata.ops.crust_dir()).unwrap().count(), 0);
    });
}

#[test]
fn stats_and_expansion_use_katas_commands() {
    with_kata(|kata| {
        let target = kata.ops.target("mount");
        assert_code(kata.ops.stats(&target), Code::NotFound, "has no entry");
        kata.ops.stage(kata.ops.staging(&target)).unwrap();
        assert_code(
            kata.ops.stats(&target),
            Code::FailedPrecondition,
            "no container runtime has claimed",
        );
        assert_eq!(fs::read_to_string(&kata.seen).unwrap(), "", "the program was not called");
        kata.claim(&target);
        let stats = kata.ops.stats(&target).unwrap();
        assert_eq!((stats.usage[0].total, stats.usage[1].total), (10, 5));
        // The required size; the device's if none is set; at most the limit.
        for (required, limit, size) in [(8192, 0, 8192), (0, 0, 16 << 20), (0, 1 << 20, 1 << 20)] {
            assert_eq!(kata.ops.expand(&target, required, limit).unwrap(), size);
        }
        let seen = fs::read_to_string(&kata.seen).unwrap();
        assert!(seen.contains(&format!("direct-volume stats --volume-path {target}\n")), "{seen}");
        assert!(
            seen.contains(&format!("direct-volume resize --volume-path {target} --size 8192\n")),
            "{seen}"
        );
        let long = format!("/{}", "x".repeat(189));
        assert_code(kata.ops.stats(&long), Code::InvalidArgument, "189 bytes");
    });
}

#[test]
fn entries_of_a_running_kata_sandbox_are_not_collected() {
    with_kata(|kata| {
        let (live, left) = (kata.ops.target("live"), kata.ops.target("left"));
        for target in [&live, &left] {
            kata.ops.stage(kata.ops.staging(target)).unwrap();
        }
        kata.claim(&live);
        for target in [&live, &left] {
            fs::remove_dir(target).unwrap();
        }
        wait_for("the leftover entry is removed", || !kata.entry(&left).exists());
        assert!(kata.entry(&live).exists());
        fs::remove_dir(kata.sandboxes.join("c9be9e")).unwrap();
        wait_for("the entry without a sandbox is removed", || !kata.entry(&live).exists());
    });
}

//! The versions of other projects' programs that manifests, pages and tools name.

use super::tree::read;

#[test]
fn the_snapshot_controller_is_of_the_release_of_csi_snapshotter() {
    let manifest = read("deploy/base/controller.yaml");
    let (_, tag) = manifest.split_once("/csi-snapshotter:").unwrap();
    let tag = tag.split_whitespace().next().unwrap();
    let module = format!("github.com/kubernetes-csi/external-snapshotter/v8 {tag} ");
    assert!(read("hack/tools/kubernetes/go.mod").contains(&module), "{module}");
    let page = read("docs/guide/install.md");
    // The released manifest names an earlier image, in which groups are off.
    for words in [
        format!("git clone --branch {tag} "),
        format!("snapshot-controller=registry.k8s.io/sig-storage/snapshot-controller:{tag}"),
    ] {
        assert!(page.contains(&words), "{words}");
    }
    for script in ["hack/kind-demo.sh", "hack/e2e/cluster.sh"] {
        let text = read(script);
        let installs = "snapshot_controller | kubectl apply --server-side -f -";
        assert!(text.contains(installs), "{script} installs another manifest");
    }
}

/// hack/release-check.sh runs the commands of README.md, which names the files of this version.
#[test]
fn the_install_block_of_the_readme_is_that_of_the_guide() {
    let readme = read("README.md");
    let (_, block) = readme.split_once("\n## Install\n").unwrap();
    let (block, _) = block.split_once("\n## ").unwrap();
    let commands: Vec<&str> = block
        .lines()
        .filter_map(|line| line.strip_prefix("    "))
        .filter(|line| !line.starts_with('#'))
        .collect();
    assert!(commands.len() >= 5, "{commands:?}");
    let guide = read("docs/guide/install.md");
    for command in commands {
        assert!(guide.contains(&format!("  {command}\n")), "the guide has no {command}");
    }
    let version = env!("CARGO_PKG_VERSION");
    assert!(block.contains(&format!("csi-loopback_{version}_amd64.deb")), "{block}");
}

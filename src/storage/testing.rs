//! What unit tests of several modules use.

/// Whether the test runs as root; reports a skip if not.
pub fn have_root() -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        println!("SKIPPED: {}: needs root", std::thread::current().name().unwrap_or_default());
    }
    is_root
}

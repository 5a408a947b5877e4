#!/usr/bin/env bash
# hack/release/build-test.sh: two builds in two directories are equal, shown with a small crate in place of csi-loopback, whose
# builds take minutes. It has what makes builds differ: panics with paths, a build script, C code.
set -euo pipefail
# shellcheck source=hack/lib.sh
source "$(dirname "$0")/../lib.sh"
# shellcheck source=hack/release/build.sh
source "$repo/hack/release/build.sh"

# shellcheck disable=SC2034 # for build.sh
trial=1 missing=()
say() { printf '%4d s  %s\n' "$SECONDS" "$*"; }
lacks() { say "not made: $1"; }

out=$(mktemp --directory --tmpdir csi-loopback-build.XXXXXX)
trap 'rm -rf "$out"' EXIT
repo=$out/crate
mkdir -p "$repo/src"
cat >"$repo/Cargo.toml" <<'END'
[package]
name = "csi-loopback"
version = "0.0.0"
edition = "2024"
build = "build.rs"
[workspace]
[profile.release]
lto = "thin"
codegen-units = 4
END
cat >"$repo/build.rs" <<'END'
fn main() {
    let out = std::env::var("OUT_DIR").unwrap();
    std::fs::write(format!("{out}/made.rs"), "pub fn made(at: usize) -> u8 { [1, 2, 3][at] }").unwrap();
    let compiler = std::env::var("CC_x86_64_unknown_linux_musl").unwrap_or("gcc".to_owned());
    let flags = std::env::var("CFLAGS").unwrap_or_default();
    let source = std::env::current_dir().unwrap().join("src/part.c");
    let run = |line: &mut std::process::Command| assert!(line.status().unwrap().success());
    run(std::process::Command::new(compiler).args(flags.split(' ').filter(|flag| !flag.is_empty())).args(["-g", "-c"])
        .arg(&source).args(["-o", &format!("{out}/part.o")]));
    run(std::process::Command::new("ar").args(["crsD", &format!("{out}/libpart.a"), &format!("{out}/part.o")]));
    println!("cargo:rustc-link-search=native={out}\ncargo:rustc-link-lib=static=part");
}
END
echo 'const char *part_file(void) { return __FILE__; }' >"$repo/src/part.c"
cat >"$repo/src/main.rs" <<'END'
mod made { include!(concat!(env!("OUT_DIR"), "/made.rs")); }
unsafe extern "C" { fn part_file() -> *const std::ffi::c_char; }
fn main() {
    let at = std::env::args().count();
    println!("{} {} {:?}", file!(), made::made(at), unsafe { std::ffi::CStr::from_ptr(part_file()) });
}
END
cd "$repo"
git init --quiet
cargo generate-lockfile --offline --quiet
git add .
git -c user.name=test -c user.email=test@localhost commit --quiet --message test
mkdir -p "$out/.build"
build_twice "$(uname -m)" || die "the builds failed"
! grep --text --quiet --fixed-strings "$out" "$out/.build/$(uname -m)/csi-loopback" || die "the binary names the directory of its build"
"$out/.build/$(uname -m)/csi-loopback"

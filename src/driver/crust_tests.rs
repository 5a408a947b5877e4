use super::*;
use std::os::unix::net::UnixListener;
use std::thread;
use storage::{Deferral, FsType};

/// A client with its own socket and tokio runtime.
struct Scene {
    directory: tempfile::TempDir,
    crust: Crust,
    _runtime: tokio::runtime::Runtime,
}

fn scene() -> Scene {
    let directory = tempfile::tempdir().unwrap();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let endpoint = directory.path().join("crust.sock").to_str().unwrap().parse().unwrap();
    let _inside = runtime.enter();
    let crust = Crust::new(&endpoint, Duration::from_secs(60));
    drop(_inside);
    Scene { directory, crust, _runtime: runtime }
}

impl Scene {
    fn listen(&self) -> UnixListener {
        UnixListener::bind(self.directory.path().join("crust.sock")).unwrap()
    }
}

/// The error of each call, with the name of the method.
fn all_errors(crust: &Crust) -> [(&'static str, Error); 4] {
    let target = Path::new("/pods/1/mount");
    let deferral = Deferral::default();
    let mount = DeferredMount {
        target,
        device: Path::new("/dev/loop0"),
        fs_type: FsType::Ext4,
        flags: &[],
        deferral: &deferral,
    };
    [
        (STAGE, crust.stage(&mount).unwrap_err()),
        (UNSTAGE, crust.unstage(target).unwrap_err()),
        (STATS, crust.stats(target).unwrap_err()),
        (EXPAND, crust.expand(target, 1 << 30).unwrap_err()),
    ]
}

fn assert_all_unavailable(crust: &Crust, text: &str) {
    for (method, error) in all_errors(crust) {
        let message = error.to_string();
        assert!(matches!(error, Error::Unavailable(_)), "{error:?}");
        assert!(message.starts_with(method) && message.contains(text), "{message}");
    }
}

#[test]
fn an_unreachable_crust_ops_is_reported_with_its_socket() {
    let scene = scene();
    assert_all_unavailable(&scene.crust, "crust.sock (No such file or directory");
    drop(scene.listen());
    assert_all_unavailable(&scene.crust, "(Connection refused");
    assert_all_unavailable(&scene.crust, "--mode runtime-ops");
    assert_all_unavailable(&scene.crust, "--crust-endpoint");
}

#[test]
fn a_broken_connection_is_unavailable() {
    let scene = scene();
    let listener = scene.listen();
    // Like a crust_ops that is killed before it responds.
    thread::spawn(move || listener.incoming().for_each(drop));
    for (method, error) in all_errors(&scene.crust) {
        assert!(
            matches!(&error, Error::Unavailable(text) if text.starts_with(method)),
            "{error:?}"
        );
    }
}

fn failure(method: &'static str, code: Code) -> Failure {
    Failure { method, cause: Cause::Status(code, "its text".into()) }
}

/// Name of the variant.
fn kind(error: &Error) -> &'static str {
    match error {
        Error::Invalid { .. } => "invalid",
        Error::Unavailable(_) => "unavailable",
        Error::Precondition(_) => "precondition",
        Error::Failed(_) => "failed",
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_code_of_crust_ops_maps_to_one_error() {
    use Code::*;
    let cases = [
        // After any other code kubelet assumes that nothing was published, and never undoes it.
        (STAGE, InvalidArgument, "invalid"),
        (STAGE, Internal, "unavailable"),
        (STAGE, Unavailable, "unavailable"),
        (STAGE, PermissionDenied, "unavailable"),
        (STAGE, Unknown, "unavailable"),
        (UNSTAGE, InvalidArgument, "failed"),
        (UNSTAGE, Internal, "failed"),
        (UNSTAGE, Unavailable, "unavailable"),
        (UNSTAGE, DeadlineExceeded, "unavailable"),
        (UNSTAGE, Aborted, "unavailable"),
        (STATS, PermissionDenied, "failed"),
        (STATS, Unimplemented, "failed"),
        (STATS, DeadlineExceeded, "unavailable"),
        (STATS, ResourceExhausted, "failed"),
        (STATS, Aborted, "failed"),
        (STATS, DataLoss, "failed"),
        (STATS, Internal, "failed"),
        (EXPAND, FailedPrecondition, "unavailable"),
        (EXPAND, NotFound, "precondition"),
        (EXPAND, Unavailable, "unavailable"),
        (EXPAND, Cancelled, "unavailable"),
        (EXPAND, Aborted, "failed"),
        (EXPAND, PermissionDenied, "failed"),
        (EXPAND, Unimplemented, "failed"),
    ];
    for (method, code, expected) in cases {
        let error = to_error(failure(method, code));
        assert_eq!(kind(&error), expected, "{method} {code:?}");
        let message = error.to_string();
        assert!(message.contains(method) && message.contains("its text"), "{message}");
        assert!(message.contains(code_name(code)), "{message}");
    }
}

#[test]
fn an_unmeasurable_volume_is_reported_as_a_condition() {
    let condition_of = |code| failure(STATS, code).as_stats().unwrap();
    for (code, abnormal, text) in [
        (Code::FailedPrecondition, true, "not claimed by a container runtime"),
        (Code::NotFound, true, "published again"),
        (Code::Unavailable, false, "not mounted by any container"),
    ] {
        let RuntimeStats { usage, condition } = condition_of(code);
        assert_eq!((usage, condition.is_abnormal()), (None, abnormal), "{code:?}");
        assert!(condition.message.contains(text), "{condition:?}");
        assert!(condition.message.contains("its text"), "{condition:?}");
    }
    for code in [Code::Internal, Code::Aborted, Code::PermissionDenied, Code::DataLoss] {
        assert!(failure(STATS, code).as_stats().is_none(), "{code:?}");
    }
    // An unreachable crust_ops reports nothing.
    let unreachable = Cause::Unreachable { socket: "/run/crust.sock".into(), why: "gone".into() };
    assert!(Failure { method: STATS, cause: unreachable }.as_stats().is_none());
}

fn usage(unit: i32, total: i64) -> crust::VolumeUsage {
    crust::VolumeUsage { unit, total, used: total / 4, available: total / 2 }
}

fn stats_response(usage: Vec<crust::VolumeUsage>) -> crust::RuntimeGetVolumeStatsResponse {
    let condition = crust::VolumeCondition { abnormal: false, message: "mounted".into() };
    crust::RuntimeGetVolumeStatsResponse { usage, volume_condition: Some(condition) }
}

#[test]
fn the_usage_of_a_runtime_is_returned() {
    let (bytes, inodes) = (usage(1, 1 << 30), usage(2, 4000));
    let both = stats(stats_response(vec![inodes, bytes])).unwrap();
    let expected = Usage::Mount {
        total_bytes: 1 << 30,
        used_bytes: 1 << 28,
        available_bytes: 1 << 29,
        total_inodes: 4000,
        used_inodes: 1000,
        free_inodes: 2000,
    };
    assert_eq!(both.usage, Some(expected));
    assert_eq!(both.condition, Condition::healthy("mounted"));
    assert_eq!(stats(stats_response(vec![])).unwrap().usage, None);
    assert!(stats(stats_response(vec![bytes])).unwrap().usage.is_some());
    let without_condition =
        crust::RuntimeGetVolumeStatsResponse { usage: vec![bytes], volume_condition: None };
    assert!(!stats(without_condition).unwrap().condition.is_abnormal());
}

#[test]
fn invalid_stats_are_an_error() {
    let (bytes, inodes) = (usage(1, 1 << 30), usage(2, 4000));
    for bad in [
        stats_response(vec![inodes]),
        stats_response(vec![bytes, bytes]),
        stats_response(vec![bytes, inodes, inodes]),
        stats_response(vec![bytes, usage(0, 5)]),
        stats_response(vec![bytes, usage(7, 5)]),
        stats_response(vec![usage(1, -4)]),
    ] {
        let error = stats(bad.clone()).expect_err(&format!("{bad:?}"));
        assert!(error.to_string().starts_with(STATS), "{error}");
    }
    let mut long = stats_response(vec![]);
    long.volume_condition.as_mut().unwrap().message = "x".repeat(1 << 16);
    assert!(stats(long).unwrap().condition.message.len() < 2 * MAX_MESSAGE);
}

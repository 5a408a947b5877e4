use super::*;
use crate::backend::{Deferral, FsType};
use std::os::unix::net::UnixListener;
use std::thread;

/// A client of a socket of its own, and the threads that it works with.
struct Scene {
    directory: tempfile::TempDir,
    crust: Crust,
    _threads: tokio::runtime::Runtime,
}

fn scene(timeout: Duration) -> Scene {
    let directory = tempfile::tempdir().unwrap();
    let threads =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let endpoint = directory.path().join("crust.sock").to_str().unwrap().parse().unwrap();
    let _inside = threads.enter();
    let crust = Crust::new(&endpoint, timeout);
    drop(_inside);
    Scene { directory, crust, _threads: threads }
}

impl Scene {
    fn listen(&self) -> UnixListener {
        UnixListener::bind(self.directory.path().join("crust.sock")).unwrap()
    }
}

const PATIENCE: Duration = Duration::from_secs(60);

/// All calls, with their names.
fn all(crust: &Crust) -> [(&'static str, Error); 4] {
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

fn assert_all_unavailable(crust: &Crust, words: &str) {
    for (method, error) in all(crust) {
        let message = error.to_string();
        assert!(matches!(error, Error::Unavailable(_)), "{error:?}");
        assert!(message.starts_with(method) && message.contains(words), "{message}");
    }
}

#[test]
fn a_crust_ops_that_is_away_is_told_with_its_socket_and_the_next_step() {
    let scene = scene(PATIENCE);
    assert_all_unavailable(&scene.crust, "crust.sock (No such file or directory");
    drop(scene.listen());
    assert_all_unavailable(&scene.crust, "(Connection refused");
    assert_all_unavailable(&scene.crust, "--mode runtime-ops");
    assert_all_unavailable(&scene.crust, "--crust-endpoint");
}

#[test]
fn a_crust_ops_that_says_nothing_is_not_waited_for_longer_than_the_timeout() {
    let scene = scene(Duration::from_millis(100));
    let _silent = scene.listen();
    assert_all_unavailable(&scene.crust, "within 100ms (--crust-timeout)");
}

#[test]
fn a_connection_that_breaks_is_an_error_of_its_own() {
    let scene = scene(PATIENCE);
    let listener = scene.listen();
    // As a crust_ops that is killed before it answers.
    thread::spawn(move || listener.incoming().for_each(drop));
    for (method, error) in all(&scene.crust) {
        assert!(
            matches!(&error, Error::Unavailable(words) if words.starts_with(method)),
            "{error:?}"
        );
    }
}

fn failure(method: &'static str, code: Code) -> Failure {
    Failure { method, cause: Cause::Refused(code, "its words".into()) }
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
fn each_code_of_crust_ops_has_one_meaning_and_keeps_its_words() {
    use Code::*;
    let cases = [
        // Kubelet takes it that nothing was published after any code but these; and then never undoes it.
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
        let error = refused(failure(method, code));
        assert_eq!(kind(&error), expected, "{method} {code:?}");
        let message = error.to_string();
        assert!(message.contains(method) && message.contains("its words"), "{message}");
        assert!(message.contains(code_name(code)), "{message}");
    }
}

#[test]
fn that_nobody_can_measure_a_volume_is_told_as_its_condition() {
    let told = |code| failure(STATS, code).as_stats().unwrap();
    for (code, abnormal, words) in [
        (Code::FailedPrecondition, true, "not claimed by a container runtime"),
        (Code::NotFound, true, "published anew"),
        (Code::Unavailable, false, "no container has it mounted"),
    ] {
        let RuntimeStats { usage, condition } = told(code);
        assert_eq!((usage, condition.is_abnormal()), (None, abnormal), "{code:?}");
        assert!(condition.message.contains(words), "{condition:?}");
        assert!(condition.message.contains("its words"), "{condition:?}");
    }
    for code in [Code::Internal, Code::Aborted, Code::PermissionDenied, Code::DataLoss] {
        assert!(failure(STATS, code).as_stats().is_none(), "{code:?}");
    }
    // Of a crust_ops that is not there nothing is known.
    let away = Cause::Away { socket: "/run/crust.sock".into(), why: "gone".into() };
    assert!(Failure { method: STATS, cause: away }.as_stats().is_none());
}

fn usage(unit: i32, total: i64) -> crust::VolumeUsage {
    crust::VolumeUsage { unit, total, used: total / 4, available: total / 2 }
}

fn answer(usage: Vec<crust::VolumeUsage>) -> crust::RuntimeGetVolumeStatsResponse {
    let condition = crust::VolumeCondition { abnormal: false, message: "mounted".into() };
    crust::RuntimeGetVolumeStatsResponse { usage, volume_condition: Some(condition) }
}

#[test]
fn what_a_runtime_measures_is_passed_on() {
    let (bytes, inodes) = (usage(1, 1 << 30), usage(2, 4000));
    let both = stats(answer(vec![inodes, bytes])).unwrap();
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
    assert_eq!(stats(answer(vec![])).unwrap().usage, None);
    assert!(stats(answer(vec![bytes])).unwrap().usage.is_some());
    let unsaid =
        crust::RuntimeGetVolumeStatsResponse { usage: vec![bytes], volume_condition: None };
    assert!(!stats(unsaid).unwrap().condition.is_abnormal());
}

#[test]
fn an_answer_that_cannot_be_true_is_an_error_and_no_answer() {
    let (bytes, inodes) = (usage(1, 1 << 30), usage(2, 4000));
    for bad in [
        answer(vec![inodes]),
        answer(vec![bytes, bytes]),
        answer(vec![bytes, inodes, inodes]),
        answer(vec![bytes, usage(0, 5)]),
        answer(vec![bytes, usage(7, 5)]),
        answer(vec![usage(1, -4)]),
    ] {
        let error = stats(bad.clone()).expect_err(&format!("{bad:?}"));
        assert!(error.to_string().starts_with(STATS), "{error}");
    }
    let mut long = answer(vec![]);
    long.volume_condition.as_mut().unwrap().message = "x".repeat(1 << 16);
    assert!(stats(long).unwrap().condition.message.len() < 2 * MAX_MESSAGE);
}

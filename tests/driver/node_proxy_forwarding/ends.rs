//! Calls that do not come to a good end: clients and drivers that go away, deadlines, the end of the proxy itself.

use std::os::unix::net::UnixStream as Socket;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::net::UnixStream;
use tokio::sync::mpsc;

use super::rig::*;
use support::driver::{PATIENCE, wait_for};

#[test]
fn a_client_that_goes_away_ends_the_call_at_the_driver() {
    with_proxy(|rig| {
        let (tell, mut told) = mpsc::unbounded_channel();
        let _driver = rig.driver(move |call| {
            let tell = tell.clone();
            async move {
                tell.send("came").unwrap();
                let mut respond = call.respond;
                let _ = std::future::poll_fn(|context| respond.poll_reset(context)).await;
                tell.send("ended").unwrap();
            }
        });
        for path in [OTHER, PUBLISH] {
            let client = rig.client();
            // A call ends whose connection goes on, and one whose connection ends.
            let (answer, mut sending) = rig.block_on(client.open(path, &[]));
            sending.send_data(framed(b""), true).unwrap();
            assert_eq!(rig.block_on(told.recv()), Some("came"), "{path}");
            drop((answer, sending));
            assert_eq!(rig.block_on(told.recv()), Some("ended"), "{path}");
            let (_answer, mut sending) = rig.block_on(client.open(path, &[]));
            sending.send_data(framed(b""), true).unwrap();
            assert_eq!(rig.block_on(told.recv()), Some("came"), "{path}");
            drop(client);
            assert_eq!(rig.block_on(told.recv()), Some("ended"), "{path}");
        }
    });
}

#[test]
fn a_deadline_holds_with_its_own_code() {
    with_proxy(|rig| {
        let (came, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let counts = (Arc::clone(&came), Arc::clone(&ended));
        let _driver = rig.driver(move |call| {
            let (came, ended) = counts.clone();
            async move {
                came.fetch_add(1, Ordering::SeqCst);
                let mut respond = call.respond;
                let _ = std::future::poll_fn(|context| respond.poll_reset(context)).await;
                ended.fetch_add(1, Ordering::SeqCst);
            }
        });
        let client = rig.client();
        for path in [OTHER, PUBLISH] {
            for _ in 0..20 {
                let answer = client.call(path, &[("grpc-timeout", "50m")], framed(b""));
                let answer = rig.block_on(answer).unwrap();
                assert_eq!(answer.code(), Some("4"), "{path}: {answer:?}");
            }
        }
        // What the driver spends on them ends, too. (One whose time was up at once has not come to it.)
        wait_for("the calls' end at the driver", || {
            let ended = ended.load(Ordering::SeqCst);
            ended > 0 && ended == came.load(Ordering::SeqCst)
        });
    });
}

#[test]
fn a_driver_that_is_away_is_unavailable_and_found_when_it_is_back() {
    with_proxy(|rig| {
        let client = rig.client();
        for round in 0..3 {
            for path in [OTHER, PUBLISH] {
                let answer = rig.block_on(client.call(path, &[], framed(b""))).unwrap();
                assert_eq!(answer.code(), Some("14"), "{round}: {answer:?}");
                assert!(answer.words().contains("csi.sock"), "{answer:?}");
            }
            let driver = rig.driver(Call::ok);
            for path in [OTHER, PUBLISH] {
                // The first call already, whatever was tried before.
                let answer = rig.block_on(client.call(path, &[], framed(b""))).unwrap();
                assert_eq!(answer.code(), Some("0"), "{round}: {answer:?}");
            }
            drop(driver);
            // One that was replaced between two calls is not taken for one that is away.
            let driver = rig.driver(Call::ok);
            let answer = rig.block_on(client.call(PUBLISH, &[], framed(b""))).unwrap();
            assert_eq!(answer.code(), Some("0"), "{round}: {answer:?}");
            drop(driver);
        }
    });
}

#[test]
fn a_driver_that_says_nothing_holds_up_only_who_waits_for_it() {
    with_proxy(|rig| {
        // Connections are taken in by the kernel, and nobody ever speaks on them.
        let socket = rig.driver_socket();
        let silent = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let client = rig.client();
        let answer = rig.block_on(client.call(PUBLISH, &[("grpc-timeout", "50m")], framed(b"")));
        assert_eq!(answer.unwrap().code(), Some("4"));
        drop(silent);
        std::fs::remove_file(&socket).unwrap();
        let _driver = rig.driver(Call::ok);
        let answer = rig.block_on(client.call(PUBLISH, &[("grpc-timeout", "10S")], framed(b"")));
        assert_eq!(answer.unwrap().code(), Some("0"));
    });
}

#[test]
fn a_driver_that_more_call_than_it_can_take_in_is_waited_for() {
    with_proxy(|rig| {
        let listener = rig.short_queue(1);
        // Until the queue is full: to whoever comes next the kernel says EAGAIN.
        let mut waiting = Vec::new();
        let full = rig.block_on(async {
            loop {
                match UnixStream::connect(rig.driver_socket()).await {
                    Ok(stream) => waiting.push(stream),
                    Err(error) => break error,
                }
            }
        });
        assert_eq!(full.kind(), std::io::ErrorKind::WouldBlock);
        let client = rig.client();
        let mut answers = Vec::new();
        for _ in 0..5 {
            let (mut answer, mut sending) = rig.block_on(client.open(PUBLISH, &[]));
            sending.send_data(framed(b""), true).unwrap();
            let soon = Duration::from_millis(20);
            let early = rig.block_on(async { tokio::time::timeout(soon, &mut answer).await });
            assert!(early.is_err(), "{early:?}");
            answers.push(answer);
        }
        drop(waiting);
        let _driver = rig.driver_on(listener, Call::ok);
        for answer in answers {
            assert_eq!(rig.block_on(take(answer)).unwrap().code(), Some("0"));
        }
    });
}

#[test]
fn a_proxy_that_is_told_to_end_lets_calls_finish() {
    with_proxy(|rig| {
        let (tell, mut told) = mpsc::unbounded_channel();
        let go = Arc::new(tokio::sync::Notify::new());
        let wait = Arc::clone(&go);
        let _driver = rig.driver(move |call| {
            let (tell, wait) = (tell.clone(), Arc::clone(&wait));
            async move {
                tell.send(()).unwrap();
                wait.notified().await;
                call.ok().await;
            }
        });
        let client = rig.client();
        let (answer, mut sending) = rig.block_on(client.open(PUBLISH, &[]));
        sending.send_data(framed(b""), true).unwrap();
        rig.block_on(told.recv()).unwrap();
        rig.proxy.signal(Signal::SIGTERM);
        // It takes nobody any more, so that it is past whatever it does with those that it has.
        wait_for("nobody is taken", || Socket::connect(rig.socket()).is_err());
        go.notify_one();
        let answer = rig.block_on(take(answer)).unwrap();
        assert_eq!(answer.code(), Some("0"));
        assert!(rig.proxy.wait(PATIENCE).unwrap().success());
        // The connection is still the client's: the proxy has told it that no more is taken.
        assert!(!rig.proxy.log().contains("did not end in time"), "{}", rig.proxy.log());
        assert!(!rig.socket().exists());
    });
}

#[test]
fn a_proxy_that_is_killed_in_mid_call_leaves_nothing_that_its_successor_stumbles_over() {
    with_proxy(|rig| {
        let (tell, mut told) = mpsc::unbounded_channel();
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let _driver = rig.driver(move |call| {
            let (tell, counted) = (tell.clone(), Arc::clone(&counted));
            async move {
                if counted.fetch_add(1, Ordering::SeqCst) % 2 == 1 {
                    return call.ok().await;
                }
                tell.send("came").unwrap();
                let mut respond = call.respond;
                let _ = std::future::poll_fn(|context| respond.poll_reset(context)).await;
                tell.send("ended").unwrap();
            }
        });
        for _ in 0..3 {
            let client = rig.client();
            let (answer, mut sending) = rig.block_on(client.open(PUBLISH, &[]));
            sending.send_data(framed(b""), true).unwrap();
            assert_eq!(rig.block_on(told.recv()), Some("came"));
            rig.proxy.signal(Signal::SIGKILL);
            rig.proxy.wait(PATIENCE).unwrap();
            // Kubelet learns at once, and the driver need not work on for nobody.
            assert!(rig.block_on(take(answer)).is_err());
            assert_eq!(rig.block_on(told.recv()), Some("ended"));
            rig.start_again();
            let client = rig.client();
            let again = rig.block_on(client.call(PUBLISH, &[], framed(b""))).unwrap();
            assert_eq!(again.code(), Some("0"));
        }
    });
}

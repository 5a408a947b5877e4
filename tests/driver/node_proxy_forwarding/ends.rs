//! Interrupted calls: clients and drivers that disconnect, deadlines, shutdown of the proxy.

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
fn a_client_disconnect_cancels_the_call_at_the_driver() {
    with_proxy(|rig| {
        let (event_sender, mut events) = mpsc::unbounded_channel();
        let _driver = rig.driver(move |call| {
            let event_sender = event_sender.clone();
            async move {
                event_sender.send("came").unwrap();
                let mut respond = call.respond;
                let _ = std::future::poll_fn(|context| respond.poll_reset(context)).await;
                event_sender.send("ended").unwrap();
            }
        });
        for path in [OTHER, PUBLISH] {
            let client = rig.client();
            // A call that ends while its connection continues, and one whose connection ends.
            let (answer, mut sending) = rig.block_on(client.open(path, &[]));
            sending.send_data(framed(b""), true).unwrap();
            assert_eq!(rig.block_on(events.recv()), Some("came"), "{path}");
            drop((answer, sending));
            assert_eq!(rig.block_on(events.recv()), Some("ended"), "{path}");
            let (_answer, mut sending) = rig.block_on(client.open(path, &[]));
            sending.send_data(framed(b""), true).unwrap();
            assert_eq!(rig.block_on(events.recv()), Some("came"), "{path}");
            drop(client);
            assert_eq!(rig.block_on(events.recv()), Some("ended"), "{path}");
        }
    });
}

#[test]
fn a_deadline_is_enforced_with_deadline_exceeded() {
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
        // Their work in the driver ends too. (A call whose deadline passed immediately did not
        // reach it.)
        wait_for("the calls' end at the driver", || {
            let ended = ended.load(Ordering::SeqCst);
            ended > 0 && ended == came.load(Ordering::SeqCst)
        });
    });
}

#[test]
fn an_absent_driver_is_unavailable_until_it_returns() {
    with_proxy(|rig| {
        let client = rig.client();
        for round in 0..3 {
            for path in [OTHER, PUBLISH] {
                let answer = rig.block_on(client.call(path, &[], framed(b""))).unwrap();
                assert_eq!(answer.code(), Some("14"), "{round}: {answer:?}");
                assert!(answer.status_message().contains("csi.sock"), "{answer:?}");
            }
            let driver = rig.driver(Call::ok);
            for path in [OTHER, PUBLISH] {
                // Including the first call, regardless of earlier attempts.
                let answer = rig.block_on(client.call(path, &[], framed(b""))).unwrap();
                assert_eq!(answer.code(), Some("0"), "{round}: {answer:?}");
            }
            drop(driver);
            // A driver that was replaced between two calls is not treated as absent.
            let driver = rig.driver(Call::ok);
            let answer = rig.block_on(client.call(PUBLISH, &[], framed(b""))).unwrap();
            assert_eq!(answer.code(), Some("0"), "{round}: {answer:?}");
            drop(driver);
        }
    });
}

#[test]
fn a_silent_driver_delays_only_its_own_calls() {
    with_proxy(|rig| {
        // The kernel accepts connections, and no process responds on them.
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
fn a_full_connection_queue_of_the_driver_is_retried() {
    with_proxy(|rig| {
        let listener = rig.short_queue(1);
        // Until the queue is full: the next client gets EAGAIN.
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
fn a_proxy_completes_running_calls_at_shutdown() {
    with_proxy(|rig| {
        let (event_sender, mut events) = mpsc::unbounded_channel();
        let go = Arc::new(tokio::sync::Notify::new());
        let wait = Arc::clone(&go);
        let _driver = rig.driver(move |call| {
            let (event_sender, wait) = (event_sender.clone(), Arc::clone(&wait));
            async move {
                event_sender.send(()).unwrap();
                wait.notified().await;
                call.ok().await;
            }
        });
        let client = rig.client();
        let (answer, mut sending) = rig.block_on(client.open(PUBLISH, &[]));
        sending.send_data(framed(b""), true).unwrap();
        rig.block_on(events.recv()).unwrap();
        rig.proxy.signal(Signal::SIGTERM);
        // It accepts no connection any more, so it has begun to drain the existing ones.
        wait_for("no connection is accepted", || Socket::connect(rig.socket()).is_err());
        go.notify_one();
        let answer = rig.block_on(take(answer)).unwrap();
        assert_eq!(answer.code(), Some("0"));
        assert!(rig.proxy.wait(PATIENCE).unwrap().success());
        // The connection is still open on the client's side: the proxy has announced that it
        // accepts no calls.
        assert!(
            !rig.proxy.log().contains("did not end within the drain timeout"),
            "{}",
            rig.proxy.log()
        );
        assert!(!rig.socket().exists());
    });
}

#[test]
fn a_killed_proxy_does_not_affect_the_next_one() {
    with_proxy(|rig| {
        let (event_sender, mut events) = mpsc::unbounded_channel();
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let _driver = rig.driver(move |call| {
            let (event_sender, counted) = (event_sender.clone(), Arc::clone(&counted));
            async move {
                if counted.fetch_add(1, Ordering::SeqCst) % 2 == 1 {
                    return call.ok().await;
                }
                event_sender.send("came").unwrap();
                let mut respond = call.respond;
                let _ = std::future::poll_fn(|context| respond.poll_reset(context)).await;
                event_sender.send("ended").unwrap();
            }
        });
        for _ in 0..3 {
            let client = rig.client();
            let (answer, mut sending) = rig.block_on(client.open(PUBLISH, &[]));
            sending.send_data(framed(b""), true).unwrap();
            assert_eq!(rig.block_on(events.recv()), Some("came"));
            rig.proxy.signal(Signal::SIGKILL);
            rig.proxy.wait(PATIENCE).unwrap();
            // Kubelet sees the failure immediately, and the driver can stop working on the call.
            assert!(rig.block_on(take(answer)).is_err());
            assert_eq!(rig.block_on(events.recv()), Some("ended"));
            rig.start_again();
            let client = rig.client();
            let again = rig.block_on(client.call(PUBLISH, &[], framed(b""))).unwrap();
            assert_eq!(again.code(), Some("0"));
        }
    });
}

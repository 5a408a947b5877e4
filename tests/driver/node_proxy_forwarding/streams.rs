//! Streams, in both directions, and clients that are slow or do not read at all.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::rig::*;

/// More than anybody may hold of a stream that nobody reads.
const LONG: usize = 64 << 20;
/// What may lie about of it: windows and buffers of three connections (client, proxy, driver).
const UNDER_WAY: usize = 4 << 20;

#[test]
fn messages_go_to_and_fro_while_a_stream_goes_on() {
    with_proxy(|rig| {
        // Each message is answered before the next is sent: whoever collected them would wait for ever.
        let _driver = rig.driver(|call| async move {
            let mut body = call.request.into_body();
            let mut respond = call.respond;
            let mut stream = respond.send_response(head(&[]), false).unwrap();
            while let Some(Ok(piece)) = body.data().await {
                let _ = body.flow_control().release_capacity(piece.len());
                stream.send_data(piece, false).unwrap();
            }
            stream.send_trailers(headers(&[("grpc-status", "0"), ("x-end", "said")])).unwrap();
        });
        let client = rig.client();
        rig.block_on(async {
            let (answer, mut sending) = client.open(OTHER, &[]).await;
            let mut body = answer.await.unwrap().into_body();
            for number in 0..100_u32 {
                let message = framed(&number.to_be_bytes());
                sending.send_data(message.clone(), false).unwrap();
                let piece = body.data().await.unwrap().unwrap();
                body.flow_control().release_capacity(piece.len()).unwrap();
                assert_eq!(piece, message);
            }
            sending.send_data(framed(b""), true).unwrap();
            let (last, trailers) = read(body).await.unwrap();
            assert_eq!((last, &trailers["x-end"]), (framed(b""), &"said".parse().unwrap()));
        });
    });
}

#[test]
fn a_client_that_does_not_read_costs_no_memory_and_holds_up_nobody() {
    with_proxy(|rig| {
        let sent = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&sent);
        let _driver = rig.driver(move |call| {
            let counted = Arc::clone(&counted);
            async move {
                if call.request.uri().path() == PUBLISH {
                    return call.ok().await;
                }
                let mut respond = call.respond;
                let mut stream = respond.send_response(head(&[]), false).unwrap();
                let count = |bytes| {
                    counted.fetch_add(bytes, Ordering::SeqCst);
                };
                pour(&mut stream, LONG, count).await;
                let _ = stream.send_trailers(headers(&[("grpc-status", "0")]));
            }
        });
        let client = rig.client();
        rig.block_on(async { client.call(PUBLISH, &[], framed(b"")).await.unwrap() });
        let before = rig.memory();
        let mut stalled = Vec::new();
        let silent: Vec<Client> = (0..3).map(|_| rig.client()).collect();
        for one in &silent {
            let (answer, mut sending) = rig.block_on(one.open(OTHER, &[]));
            sending.send_data(framed(b""), true).unwrap();
            stalled.push(rig.block_on(answer).unwrap().into_body());
        }
        for _ in 0..500 {
            let answer = rig.block_on(client.call(PUBLISH, &[], framed(b""))).unwrap();
            assert_eq!(answer.code(), Some("0"));
        }
        let (moved, grown) = (sent.load(Ordering::SeqCst), rig.memory().saturating_sub(before));
        assert!(moved < 3 * UNDER_WAY, "{moved} bytes were taken from the driver for nobody");
        assert!(grown < 16 << 20, "the proxy has grown by {grown} bytes");
        // It was only slow: each gets the whole.
        for body in stalled {
            let (bytes, trailers) = rig.block_on(async {
                let mut body = body;
                let mut taken = 0;
                while let Some(piece) = body.data().await {
                    let piece = piece.unwrap();
                    body.flow_control().release_capacity(piece.len()).unwrap();
                    taken += piece.len();
                }
                (taken, body.trailers().await.unwrap().unwrap())
            });
            assert_eq!((bytes, &trailers["grpc-status"]), (LONG, &"0".parse().unwrap()));
        }
        let grown = rig.memory().saturating_sub(before);
        println!(
            "report: the proxy grew by {} KiB while {} MiB went through it",
            grown >> 10,
            3 * (LONG >> 20)
        );
        assert!(grown < 16 << 20, "the proxy has grown by {grown} bytes");
    });
}

#[test]
fn a_driver_that_does_not_read_is_sent_no_more_than_it_takes() {
    with_proxy(|rig| {
        let _driver = rig.driver(|call| async move {
            let mut respond = call.respond;
            let mut stream = respond.send_response(head(&[]), false).unwrap();
            // The request is held and not read.
            let gone = std::future::poll_fn(|context| stream.poll_reset(context)).await;
            drop((gone, call.request));
        });
        let client = rig.client();
        let before = rig.memory();
        let sent = rig.block_on(async {
            let (answer, mut sending) = client.open(OTHER, &[]).await;
            let _body = answer.await.unwrap().into_body();
            let sent = AtomicUsize::new(0);
            let pouring = pour(&mut sending, LONG, |bytes| {
                sent.fetch_add(bytes, Ordering::SeqCst);
            });
            // Until nothing has moved for as long as a hundred others need.
            let other = client.open(OTHER, &[]);
            tokio::select! {
                _ = pouring => {}
                () = async {
                    drop(other.await);
                    let mut last = usize::MAX;
                    while last != sent.load(Ordering::SeqCst) {
                        last = sent.load(Ordering::SeqCst);
                        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
                    }
                } => {}
            }
            sent.load(Ordering::SeqCst)
        });
        let grown = rig.memory().saturating_sub(before);
        assert!(sent < UNDER_WAY, "{sent} bytes were taken from the client for nobody");
        assert!(grown < 16 << 20, "the proxy has grown by {grown} bytes");
    });
}

//! Malicious and defective clients: the memory that they can make the proxy use.

use bytes::Bytes;
use csi_loopback::proto::csi::v1 as csi;
use prost::Message as _;

use super::rig::*;

/// Maximum size of a decoded request.
const MAX_MESSAGE: usize = 4 << 20;

fn publishing(bytes: usize) -> Bytes {
    let of = |id: usize| csi::NodePublishVolumeRequest {
        volume_id: "v".repeat(id),
        target_path: "/mnt/elsewhere".into(),
        ..Default::default()
    };
    let more = of(bytes).encoded_len() - bytes;
    let request = of(bytes - more);
    assert_eq!(request.encoded_len(), bytes);
    framed(&request.encode_to_vec())
}

#[test]
fn only_oversized_decoded_requests_are_refused() {
    with_proxy(|rig| {
        let _driver = rig.driver(Call::ok);
        let client = rig.client();
        let longest = rig.block_on(client.call(PUBLISH, &[], publishing(MAX_MESSAGE))).unwrap();
        assert_eq!(longest.code(), Some("0"));
        let refused = rig.block_on(client.call(PUBLISH, &[], publishing(MAX_MESSAGE + 1))).unwrap();
        assert_eq!(refused.code(), Some("8"), "{refused:?}");
        assert!(refused.status_message().contains(&MAX_MESSAGE.to_string()), "{refused:?}");
        let before = rig.memory();
        let long = framed(&vec![7; 16 * MAX_MESSAGE]);
        let other = rig.block_on(client.call(OTHER, &[], long)).unwrap();
        assert_eq!(other.code(), Some("0"));
        let grown = rig.memory().saturating_sub(before);
        assert!(grown < 16 << 20, "the proxy has grown by {grown} bytes");
    });
}

#[test]
fn memory_for_long_requests_is_bounded() {
    with_proxy(|rig| {
        let _driver = rig.driver(Call::ok);
        let before = rig.memory();
        let long = publishing(MAX_MESSAGE);
        let clients: Vec<Client> = (0..4).map(|_| rig.client()).collect();
        // All except the last byte of each: a proxy that read them all would need 400 MiB.
        let mut held = Vec::new();
        for number in 0..100 {
            let (answer, mut sending) = rig.block_on(clients[number % 4].open(PUBLISH, &[]));
            sending.send_data(long.slice(..long.len() - 1), false).unwrap();
            held.push((answer, sending));
        }
        let other = rig.client();
        for _ in 0..200 {
            let answer = rig.block_on(other.call(PUBLISH, &[], publishing(1000))).unwrap();
            assert_eq!(answer.code(), Some("0"));
        }
        let grown = rig.memory().saturating_sub(before);
        println!(
            "report: the proxy grew by {} MiB with 100 unfinished requests of 4 MiB",
            grown >> 20
        );
        assert!(grown < 128 << 20, "the proxy has grown by {grown} bytes");
        // They were only slow: each of them completes.
        let mut answers = Vec::new();
        for (answer, mut sending) in held {
            sending.send_data(long.slice(long.len() - 1..), true).unwrap();
            answers.push(answer);
        }
        for answer in answers {
            assert_eq!(rig.block_on(take(answer)).unwrap().code(), Some("0"));
        }
    });
}

#[test]
fn invalid_http2_affects_only_its_own_connection() {
    with_proxy(|rig| {
        use std::io::{Read, Write};
        let _driver = rig.driver(Call::ok);
        let client = rig.client();
        let preface: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        let giant_frame =
            [preface, &[0xff, 0xff, 0xff, 0x01, 0x05, 0, 0, 0, 1], &[0; 1000]].concat();
        let settings_flood = [preface, &[0, 0, 0, 4, 0, 0, 0, 0, 0].repeat(20_000)].concat();
        let resets: Vec<u8> = (0..20_000_u32)
            .flat_map(|number| {
                let id = (2 * number + 1).to_be_bytes();
                [&[0, 0, 4, 3, 0], id.as_slice(), &[0, 0, 0, 8]].concat()
            })
            .collect();
        let reset_flood = [preface, &[0, 0, 0, 4, 0, 0, 0, 0, 0], &resets].concat();
        let noise = support::pattern(1, 100_000);
        for bytes in
            [b"GET / HTTP/1.1\r\n\r\n".to_vec(), giant_frame, settings_flood, reset_flood, noise]
        {
            let mut stream = std::os::unix::net::UnixStream::connect(rig.socket()).unwrap();
            stream.set_read_timeout(Some(std::time::Duration::from_millis(200))).unwrap();
            let _ = stream.write_all(&bytes);
            let _ = stream.read(&mut [0; 4096]);
            let answer = rig.block_on(client.call(PUBLISH, &[], publishing(100))).unwrap();
            assert_eq!(answer.code(), Some("0"));
        }
        assert!(rig.proxy.ended().is_none());
        assert!(!rig.proxy.log().contains("panicked"), "{}", rig.proxy.log());
    });
}

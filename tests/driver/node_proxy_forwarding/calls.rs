//! Unary calls: nothing is added, omitted or changed.

use bytes::Bytes;
use csi_loopback::proto::csi::v1 as csi;
use prost::Message as _;

use super::rig::*;

/// A publish of an unknown pod, at a path that is not kubelet's.
fn publishing() -> Bytes {
    let request = csi::NodePublishVolumeRequest {
        volume_id: "v".into(),
        target_path: "/mnt/elsewhere".into(),
        ..Default::default()
    };
    framed(&request.encode_to_vec())
}

#[test]
fn headers_metadata_and_trailers_are_forwarded_unchanged() {
    with_proxy(|rig| {
        let (_driver, seen) = rig.recording_driver(|mut respond| {
            let said = head(&[("x-driver", "here"), ("x-driver-bin", "AAEC")]);
            let mut stream = respond.send_response(said, false).unwrap();
            stream.send_data(framed(b"what it says"), false).unwrap();
            let last = [
                ("grpc-status", "9"),
                ("grpc-message", "no%20room%0Aleft"),
                ("grpc-status-details-bin", "CAkSB25vIHJvb20"),
                ("x-last", "one"),
                ("x-last", "two"),
            ];
            stream.send_trailers(headers(&last)).unwrap();
        });
        let client = rig.client();
        let metadata = [
            ("user-agent", "grpc-go/1.70"),
            ("authorization", "Bearer abc"),
            ("x-many", "1"),
            ("x-many", "2"),
            ("x-bytes-bin", "AAECAw"),
            ("grpc-accept-encoding", "identity,gzip"),
            ("grpc-timeout", "30S"),
        ];
        for path in [OTHER, "/csi.v1.Controller/CreateVolume", PUBLISH] {
            let answer = rig.block_on(client.call(path, &metadata, publishing())).unwrap();
            let one = seen.lock().unwrap().pop().unwrap();
            assert_eq!((one.path.as_str(), &one.body), (path, &publishing()));
            for (name, _) in metadata {
                let wanted: Vec<&str> =
                    metadata.iter().filter(|(other, _)| *other == name).map(|(_, v)| *v).collect();
                let came: Vec<_> = one.headers.get_all(name).iter().collect();
                assert_eq!(came, wanted, "{path}: {name}");
            }
            assert_eq!(one.headers["te"], "trailers");
            assert_eq!(one.headers["content-type"], "application/grpc");
            assert_eq!(
                (&answer.head["x-driver"], &answer.head["x-driver-bin"]),
                (&"here".parse().unwrap(), &"AAEC".parse().unwrap())
            );
            assert_eq!(answer.body, framed(b"what it says"));
            assert_eq!((answer.code(), answer.status_message()), (Some("9"), "no%20room%0Aleft"));
            assert_eq!(answer.trailers["grpc-status-details-bin"], "CAkSB25vIHJvb20");
            let last: Vec<_> = answer.trailers.get_all("x-last").iter().collect();
            assert_eq!(last, ["one", "two"]);
        }
    });
}

#[test]
fn a_headers_only_error_is_forwarded_unchanged() {
    with_proxy(|rig| {
        // The usual response of servers to unimplemented methods.
        let _driver = rig.driver(|call| async move {
            let (_, mut respond) = call.take().await;
            let refused = head(&[("grpc-status", "12"), ("grpc-message", "unknown%20method")]);
            let _ = respond.send_response(refused, true);
        });
        let client = rig.client();
        for path in [OTHER, PUBLISH] {
            let answer = rig.block_on(client.call(path, &[], publishing())).unwrap();
            assert_eq!(
                (answer.code(), answer.status_message()),
                (Some("12"), "unknown%20method"),
                "{path}"
            );
            assert_eq!((answer.body.len(), answer.trailers.len()), (0, 0), "{path}");
        }
    });
}

#[test]
fn an_unreadable_message_is_forwarded_to_the_driver() {
    with_proxy(|rig| {
        let (_driver, seen) = rig.recording_driver(|respond| {
            answer(respond, &[], &[("grpc-status", "3"), ("grpc-message", "the drivers words")]);
        });
        let client = rig.client();
        let plain = publishing();
        let compressed = [&[1], &plain[1..]].concat();
        let twice = [plain.as_ref(), plain.as_ref()].concat();
        let half = plain[..plain.len() - 1].to_vec();
        let claims_more = [&[0, 0xff, 0xff, 0xff, 0xff], &plain[5..]].concat();
        // A length beyond the end of the message; an unterminated group; invalid UTF-8.
        let damaged = framed(&[0x0a, 0x7f, b'v']).to_vec();
        let group = framed(&[0x0b; 64]).to_vec();
        let no_text = framed(&[0x0a, 0x01, 0xff]).to_vec();
        let cases =
            [Vec::new(), vec![0], compressed, twice, half, claims_more, damaged, group, no_text];
        for method in
            ["NodePublishVolume", "NodeUnpublishVolume", "NodeGetVolumeStats", "NodeExpandVolume"]
        {
            for bytes in &cases {
                let path = format!("/csi.v1.Node/{method}");
                let answer = rig.block_on(client.call(&path, &[], bytes.clone())).unwrap();
                assert_eq!(answer.status_message(), "the drivers words", "{method}: {bytes:?}");
                assert_eq!(seen.lock().unwrap().pop().unwrap().body, bytes, "{method}");
            }
        }
    });
}

#[test]
fn an_unknown_field_reaches_the_driver() {
    with_proxy(|rig| {
        let (_driver, seen) = rig.recording_driver(|respond| {
            // A field of the response is not lost either.
            answer(respond, &[&[0xa2, 0x06, 0x02, b'h', b'i']], &[("grpc-status", "0")]);
        });
        let client = rig.client();
        let request = [&publishing()[5..], &[0xa2, 0x06, 0x03, b'n', b'e', b'w']].concat();
        let answer = rig.block_on(client.call(PUBLISH, &[], framed(&request))).unwrap();
        assert_eq!(seen.lock().unwrap().pop().unwrap().body, framed(&request));
        assert_eq!(answer.body, framed(&[0xa2, 0x06, 0x02, b'h', b'i']));
    });
}

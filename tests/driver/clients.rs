//! Clients whose libraries speak HTTP/2 in their own way.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use csi_loopback::backend::PoolKind;
use support::driver::*;
use support::examples;
use support::{BLOCK, MIB, have_root, pattern, write_direct};

fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
}

/// A header field that names an entry of HPACK's static table, or its own name.
fn field(name: Result<u8, &str>, value: &str) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    let name =
        name.map_or_else(|name| [vec![0x40], text(name)].concat(), |entry| vec![0x40 | entry]);
    [name, text(value)].concat()
}

/// grpc-core, the library below Python, C++, Ruby and PHP, sends the encoded path of the socket as
/// `:authority`.
#[test]
fn a_socket_path_as_the_authority_is_accepted() {
    with_driver(|driver| {
        let mut stream = UnixStream::connect(driver.socket()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let path = driver.socket().to_str().unwrap().replace('/', "%2F");
        // As text, and as the entry of the dynamic table that the text has made: three fields
        // were added since, and the first static entry is 1, the first dynamic one 62.
        for (number, authority) in [(1, field(Err(":authority"), &path)), (3, vec![0x80 | 65])] {
            let block = [
                field(Ok(4), "/csi.v1.Identity/Probe"),
                authority,
                vec![0x83, 0x86],
                field(Err("te"), "trailers"),
                field(Ok(31), "application/grpc"),
            ]
            .concat();
            let mut request = frame(1, 4, number, &block);
            request.extend(frame(0, 1, number, &[0; 5]));
            if number == 1 {
                let begin = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
                request = [&begin[..], &frame(4, 0, 0, b""), &request].concat();
            }
            stream.write_all(&request).unwrap();
            let kinds = answer(&mut stream, number);
            assert_eq!(kinds, [1, 0, 1], "{number}: headers, the message, and the end");
        }
    });
}

/// The kinds of frames of a response, up to its end.
fn answer(stream: &mut UnixStream, number: u8) -> Vec<u8> {
    let mut kinds = Vec::new();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).unwrap();
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        std::io::copy(&mut stream.take(u64::from(length)), &mut std::io::sink()).unwrap();
        let is_end = head[3] == 3 || (head[3] < 2 && head[4] & 1 != 0);
        if head[8] == number && (head[3] < 2 || head[3] == 3) {
            kinds.push(head[3]);
            if is_end {
                return kinds;
            }
        }
    }
}

/// A Go program that dials a path sends it as `:authority`, with Huffman code, which is not changed.
#[test]
fn a_refused_authority_leaves_a_hint_in_the_log() {
    with_driver(|driver| {
        let mut stream = UnixStream::connect(driver.socket()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        // "/csi.sock" with the code of RFC 7541, appendix B.
        let coded = [0x60, 0x88, 0x32, 0xe8, 0x39, 0x3a, 0xff];
        let authority = [&[0x41, 0x80 | coded.len() as u8][..], &coded].concat();
        let block = [field(Ok(4), "/csi.v1.Identity/Probe"), authority, vec![0x83, 0x86]].concat();
        let begin = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        let request = [&begin[..], &frame(4, 0, 0, b""), &frame(1, 4, 1, &block)].concat();
        stream.write_all(&request).unwrap();
        assert_eq!(answer(&mut stream, 1), [3], "a reset");
        wait_for("the hint", || driver.log().contains("grpc.WithAuthority"));
        // A client that expects TLS.
        let mut other = UnixStream::connect(driver.socket()).unwrap();
        other.write_all(&[0x16, 3, 1, 2, 0]).unwrap();
        wait_for("the other hint", || driver.log().contains("HTTP/2 without TLS"));
    });
}

/// grpc-core for Python, and grpc-go. A fault ends each stream once.
#[test]
fn the_example_clients_read_whole_responses() {
    let faults = ["--enable-faults", "--fault", "stream-abort,after=15"];
    if !have_root() {
        return;
    }
    let clients = examples::clients();
    let driver = Driver::with(PoolKind::Image, &faults);
    let volume = driver.volume("data", 64 * MIB, block());
    let blocks: Vec<u64> = (0..20).map(|number| number * 3).collect();
    let write = |seed| {
        driver.with_device(&volume, |device| {
            for number in &blocks {
                write_direct(device, number * BLOCK, &pattern(seed, BLOCK as usize));
            }
        });
    };
    write(1);
    let first = driver.snapshot("first", &volume);
    write(2);
    let second = driver.snapshot("second", &volume);
    let expected: Vec<_> = blocks.iter().map(|number| (number * BLOCK, BLOCK)).collect();
    let socket = driver.socket();
    let socket = socket.to_str().unwrap();
    for (language, client, _) in &clients {
        assert_eq!(client.extents(&[socket, &first]), expected, "{language}");
        assert_eq!(client.extents(&[socket, &second, &first]), expected, "{language}");
        let refused = client.command(&[socket, "none"]).output().unwrap();
        let errors = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && errors.contains("none"), "{language}: {errors}");
    }
    let log = driver.log();
    assert!(clients.is_empty() || log.contains("stream-abort"), "a stream was interrupted");
}

//! Clients whose libraries speak HTTP/2 in their own way.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use support::driver::*;

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

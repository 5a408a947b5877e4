//! Log lines about clients of a socket that the HTTP library refuses without a word. Each client can
//! cause them, so their number is limited.

use std::sync::LazyLock;

use telemetry::log_budget::LogBudget;

const RST_STREAM: u8 = 3;
const PROTOCOL_ERROR: [u8; 4] = [0, 0, 0, 1];

static BUDGET: LazyLock<LogBudget> = LazyLock::new(LogBudget::default);

/// A client sent something else than HTTP/2.
pub fn foreign_protocol() {
    warn(
        "a client of the socket does not use HTTP/2 without TLS, as gRPC does; check its protocol",
    );
}

fn warn(hint: &'static str) {
    if let Some(omitted) = BUDGET.line() {
        tracing::warn!(omitted = (omitted > 0).then_some(omitted), "{hint}");
    }
}

/// Finds the refusals of requests in what a server sends on a connection.
#[derive(Debug, Default)]
pub struct Sent {
    /// The first bytes of a frame: its head, and the error code of a RST_STREAM.
    first: [u8; 13],
    seen: usize,
    /// Bytes of the payload that remain.
    left: usize,
}

impl Sent {
    pub fn pass(&mut self, bytes: &[u8]) {
        if self.refuses(bytes) {
            warn(
                "refused a request with invalid HTTP/2 headers; if the client sends the path of the socket as \
                 :authority, set that to localhost (grpc.WithAuthority in Go, grpc.default_authority elsewhere)",
            );
        }
    }

    fn refuses(&mut self, mut bytes: &[u8]) -> bool {
        let mut found = false;
        while let Some((byte, rest)) = bytes.split_first() {
            let is_reset = self.seen >= 9 && self.first[3] == RST_STREAM;
            if self.seen < 9 || (is_reset && self.seen < self.first.len()) {
                self.first[self.seen] = *byte;
                self.seen += 1;
                bytes = rest;
                match self.seen {
                    9 => {
                        let length = [0, self.first[0], self.first[1], self.first[2]];
                        self.left = u32::from_be_bytes(length) as usize;
                    }
                    10.. => self.left = self.left.saturating_sub(1),
                    _ => {}
                }
                found |= is_reset && self.seen == 13 && self.first[9..] == PROTOCOL_ERROR;
            } else {
                let skipped = self.left.min(bytes.len());
                (bytes, self.left) = (&bytes[skipped..], self.left - skipped);
            }
            if self.seen >= 9 && self.left == 0 {
                self.seen = 0;
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_found_wherever_the_bytes_are_split() {
        let frame = |kind, payload: &[u8]| {
            [&[0, 0, payload.len() as u8, kind, 0, 0, 0, 0, 1][..], payload].concat()
        };
        let data = frame(0, &[RST_STREAM; 20]);
        let stream = |code: u8| {
            [frame(4, b""), data.clone(), frame(RST_STREAM, &[0, 0, 0, code]), data.clone()]
                .concat()
        };
        for size in 1..40 {
            let refusals = |bytes: &[u8]| {
                let mut sent = Sent::default();
                bytes.chunks(size).filter(|chunk| sent.refuses(chunk)).count()
            };
            assert_eq!((refusals(&stream(1)), refusals(&stream(8))), (1, 0), "{size}");
        }
    }
}

//! HTTP requests to a driver.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream};

use super::driver::{Driver, PATIENCE};

/// The response to GET, with status line and headers.
pub fn response(address: SocketAddr, path: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
    io::read_to_string(stream)
}

/// Flags that serve health and metrics at any free port.
pub const HTTP: [&str; 2] = ["--http-endpoint", "127.0.0.1:0"];

/// The status line and body of a response to GET.
pub fn fetch(address: SocketAddr, path: &str) -> (String, String) {
    let response = response(address, path).unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

/// The driver's HTTP address, from its log.
pub fn http_address(driver: &Driver) -> SocketAddr {
    let log = driver.log();
    let line = log.lines().rfind(|line| line.contains("serving /healthz")).expect(&log);
    let address = line.split_once("address=").expect(line).1;
    address.split_whitespace().next().unwrap().parse().unwrap()
}

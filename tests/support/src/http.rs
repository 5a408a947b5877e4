//! What a driver serves over HTTP.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::driver::Driver;

/// Status line and body of an answer to GET.
pub fn fetch(address: SocketAddr, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

/// Where the driver serves HTTP, which its log tells.
pub fn http_address(driver: &Driver) -> SocketAddr {
    let log = driver.log();
    let line = log.lines().rfind(|line| line.contains("serving /healthz")).expect(&log);
    let address = line.split_once("address=").expect(line).1;
    address.split_whitespace().next().unwrap().parse().unwrap()
}

//! HTTP requests to a driver.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::driver::Driver;

/// The status line and body of a response to GET.
pub fn fetch(address: SocketAddr, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
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

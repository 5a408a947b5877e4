//! Where a CSI driver listens. CSI allows only unix sockets; some drivers also offer TCP, without
//! authentication and encryption.

use std::fmt;
use std::io;
use std::str::FromStr;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use super::SocketPath;

const TCP: &str = "tcp://";

/// The address of a CSI driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    Unix(SocketPath),
    /// The host:port of a driver.
    Tcp(String),
}

/// A connection.
pub trait Connected: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connected for T {}

impl Endpoint {
    /// # Errors
    /// The endpoint does not accept the connection.
    pub async fn connect(&self) -> io::Result<TokioIo<Box<dyn Connected>>> {
        let stream: Box<dyn Connected> = match self {
            Self::Unix(path) => Box::new(UnixStream::connect(path).await?),
            Self::Tcp(address) => {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                Box::new(stream)
            }
        };
        Ok(TokioIo::new(stream))
    }
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(address) = text.strip_prefix(TCP) else { return text.parse().map(Self::Unix) };
        let parts = address.rsplit_once(':');
        let is_address = parts.is_some_and(|(host, port)| {
            !host.is_empty()
                && !host.contains('/')
                && port.parse::<u16>().is_ok_and(|port| port > 0)
        });
        match is_address {
            true => Ok(Self::Tcp(address.to_owned())),
            false => Err(format!("{text:?} is not tcp://host:port")),
        }
    }
}

impl From<SocketPath> for Endpoint {
    fn from(path: SocketPath) -> Self {
        Self::Unix(path)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.fmt(f),
            Self::Tcp(address) => write!(f, "{TCP}{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_socket_or_a_tcp_address() {
        for text in ["unix:///run/a.sock", "tcp://127.0.0.1:9000", "tcp://[::1]:9000"] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
        assert!(matches!("/run/a.sock".parse(), Ok(Endpoint::Unix(_))));
        for bad in ["tcp://", "tcp://a", "tcp://:1", "tcp://a:0", "tcp://a:x", "tcp://a/b:1", "a:1"]
        {
            assert!(bad.parse::<Endpoint>().is_err(), "{bad}");
        }
    }
}

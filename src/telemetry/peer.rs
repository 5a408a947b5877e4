//! The client of a connection, for limits per client.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// The address of a client without its port. IPv6 addresses of one /64 network are one client,
/// because a host usually has all of them. Clients behind the same NAT are one client, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer(IpAddr);

impl Peer {
    pub fn of(address: SocketAddr) -> Self {
        match address.ip().to_canonical() {
            IpAddr::V6(ip) => {
                let [a, b, c, d, ..] = ip.segments();
                Self(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into())
            }
            ip => Self(ip),
        }
    }

    /// The client of a connection whose address is not known: it has disconnected.
    pub fn unknown() -> Self {
        Self(Ipv6Addr::UNSPECIFIED.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_host_are_one_peer() {
        let peer = |text: &str| Peer::of(text.parse().unwrap());
        assert_eq!(peer("10.0.0.1:1"), peer("10.0.0.1:2"));
        assert_eq!(peer("10.0.0.1:1"), peer("[::ffff:10.0.0.1]:2"));
        assert_ne!(peer("10.0.0.1:1"), peer("10.0.0.2:1"));
        assert_eq!(peer("[fd00::1]:1"), peer("[fd00::2]:2"));
        assert_ne!(peer("[fd00::1]:1"), peer("[fd00:0:0:1::1]:1"));
    }
}

//! The client of a connection, for limits per client.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::fair_limit::Holder;

/// The address of a client without its port. Clients behind the same NAT are one client.
///
/// Limits are shared first among networks, then among the addresses of a network. An IPv6 network
/// is a /64: a host with a whole one gains nothing by changing its address, and the pods of a node,
/// which often share one, still have a part each. An IPv4 address is a network of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer(IpAddr);

impl Peer {
    pub fn of(address: SocketAddr) -> Self {
        Self(address.ip().to_canonical())
    }

    /// The client of a connection whose address is not known: it has disconnected.
    pub fn unknown() -> Self {
        Self(Ipv6Addr::UNSPECIFIED.into())
    }
}

impl Holder for Peer {
    fn group(&self) -> Self {
        match self.0 {
            IpAddr::V6(ip) => {
                let [a, b, c, d, ..] = ip.segments();
                Self(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into())
            }
            IpAddr::V4(_) => *self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_ipv6_network_are_one_group() {
        let peer = |text: &str| Peer::of(text.parse().unwrap());
        let group = |text: &str| peer(text).group();
        assert_eq!(peer("10.0.0.1:1"), peer("10.0.0.1:2"));
        assert_eq!(peer("10.0.0.1:1"), peer("[::ffff:10.0.0.1]:2"));
        assert_ne!(group("10.0.0.1:1"), group("10.0.0.2:1"));
        assert_ne!(peer("[fd00::1]:1"), peer("[fd00::2]:2"));
        assert_eq!(group("[fd00::1]:1"), group("[fd00::2]:2"));
        assert_ne!(group("[fd00::1]:1"), group("[fd00:0:0:1::1]:1"));
    }
}

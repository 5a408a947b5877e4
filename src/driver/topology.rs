//! Where volumes and snapshots are: all of them on this node, and nowhere else (CSI Topology).

use crate::backend::{Error, Result};
use crate::proto::csi::v1 as csi;

/// This node as a topology.
#[derive(Debug, Clone)]
pub struct Place {
    key: String,
    node_id: String,
}

impl Place {
    pub fn new(driver_name: &str, node_id: &str) -> Self {
        Self { key: format!("topology.{driver_name}/node"), node_id: node_id.to_owned() }
    }

    pub fn node_id(&self) -> &str {
        &self.node_id
    }

    pub fn topology(&self) -> csi::Topology {
        csi::Topology { segments: [(self.key.clone(), self.node_id.clone())].into() }
    }

    /// Whether this node lies in `topology`. One with segments that this driver does not know is
    /// somewhere else.
    pub fn is_in(&self, topology: &csi::Topology) -> bool {
        topology.segments.iter().all(|(key, value)| *key == self.key && *value == self.node_id)
    }

    /// Fails unless a volume or snapshot on this node meets the requirement: one of `requisite` or, without
    /// those, one of `preferred` has to hold this node.
    pub fn check(&self, requirement: Option<&csi::TopologyRequirement>) -> Result<()> {
        let Some(requirement) = requirement else { return Ok(()) };
        let candidates = match requirement.requisite.as_slice() {
            [] => &requirement.preferred,
            requisite => requisite,
        };
        if candidates.is_empty() || candidates.iter().any(|topology| self.is_in(topology)) {
            return Ok(());
        }
        Err(Error::Exhausted(format!(
            "accessibility_requirements: volumes and snapshots of this driver are on {}={} only",
            self.key, self.node_id
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology(segments: &[(&str, &str)]) -> csi::Topology {
        let owned = segments.iter().map(|(key, value)| ((*key).into(), (*value).into()));
        csi::Topology { segments: owned.collect() }
    }

    #[test]
    fn only_requirements_that_hold_this_node_are_met() {
        let place = Place::new("d.example", "n1");
        let here = topology(&[("topology.d.example/node", "n1")]);
        let elsewhere = topology(&[("topology.d.example/node", "n2")]);
        let zone = topology(&[("topology.d.example/node", "n1"), ("zone", "z1")]);
        let check = |requisite: &[&csi::Topology], preferred: &[&csi::Topology]| {
            let owned = |list: &[&csi::Topology]| list.iter().map(|one| (*one).clone()).collect();
            let requirement = csi::TopologyRequirement {
                requisite: owned(requisite),
                preferred: owned(preferred),
            };
            place.check(Some(&requirement)).is_ok()
        };
        assert_eq!(place.topology(), here);
        assert!(place.check(None).is_ok());
        assert!(check(&[], &[]));
        assert!(check(&[&elsewhere, &here], &[]));
        assert!(check(&[], &[&elsewhere, &here]));
        assert!(check(&[&topology(&[])], &[]));
        assert!(!check(&[&elsewhere], &[&here]));
        assert!(!check(&[], &[&elsewhere]));
        assert!(!check(&[&zone], &[]));
    }
}

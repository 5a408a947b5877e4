//! The state of an endpoint as conditions of its DriverDiscovery.

use std::time::{Duration, SystemTime};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

use crate::aggregated_api::endpoint::EndpointError;
use crate::aggregated_api::endpoint::certificate::Certificate;
use common::text::{MAX_MESSAGE, truncate};
use kubernetes::cbt_http::{Capability, Info};

pub const REACHABLE: &str = "EndpointReachable";
pub const CAPABLE: &str = "CapabilityPresent";
pub const CERTIFICATE: &str = "CertificateValid";

/// Remaining validity at which a certificate must be renewed.
const RENEWAL: Duration = Duration::from_secs(24 * 3600);

/// Result of a probe.
pub enum Probe {
    /// The object has no usable endpoint, with the reason.
    Unusable(String),
    Called {
        info: Result<Info, EndpointError>,
        certificate: Certificate,
    },
}

impl Probe {
    /// Whether the endpoint responded or another probe cannot help before the object changes.
    pub fn is_conclusive(&self) -> bool {
        !matches!(self, Self::Called { info: Err(_), .. })
    }
}

/// Status, reason and message of a condition.
struct Finding(&'static str, &'static str, String);

const TRUE: &str = "True";
const FALSE: &str = "False";
const UNKNOWN: &str = "Unknown";

/// The conditions of the driver's object in this generation. `before` are its current conditions.
pub fn conditions(
    driver: &str,
    generation: Option<i64>,
    probe: &Probe,
    before: &[Condition],
    now: Timestamp,
) -> Vec<Condition> {
    let findings = match probe {
        Probe::Unusable(why) => [REACHABLE, CAPABLE, CERTIFICATE].map(|kind| {
            let status = if kind == REACHABLE { FALSE } else { UNKNOWN };
            (kind, Finding(status, "DiscoveryUnusable", why.clone()))
        }),
        Probe::Called { info, certificate } => [
            (REACHABLE, reachable(info)),
            (CAPABLE, capable(driver, info)),
            (CERTIFICATE, valid(certificate, now)),
        ],
    };
    let made = findings.map(|(kind, Finding(status, reason, message))| {
        let same = before.iter().find(|one| one.type_ == kind && one.status == status);
        Condition {
            type_: kind.into(),
            status: status.into(),
            reason: reason.into(),
            message: truncate(&message.replace(char::is_control, " "), MAX_MESSAGE),
            observed_generation: generation,
            last_transition_time: same.map_or(Time(now), |one| one.last_transition_time.clone()),
        }
    });
    made.into()
}

fn reachable(info: &Result<Info, EndpointError>) -> Finding {
    match info {
        Ok(_) => Finding(TRUE, "Reached", "the endpoint responds".into()),
        Err(EndpointError::Unreachable(why)) => Finding(FALSE, "Unreachable", why.clone()),
        Err(EndpointError::Invalid(why)) => Finding(FALSE, "NotUnderstood", why.clone()),
        Err(EndpointError::Problem { problem, .. }) => {
            Finding(FALSE, "Refused", format!("{:?}: {}", problem.kind, problem.message))
        }
        Err(EndpointError::Busy) => Finding(UNKNOWN, "Busy", "too many calls are running".into()),
        Err(EndpointError::NoToken(why)) => Finding(UNKNOWN, "NoToken", why.message.clone()),
    }
}

fn capable(driver: &str, info: &Result<Info, EndpointError>) -> Finding {
    let Ok(info) = info else {
        return Finding(UNKNOWN, "NotReached", "the endpoint was not reached".into());
    };
    if info.driver != driver {
        let message = format!("the endpoint belongs to the CSI driver {}", info.driver);
        return Finding(FALSE, "OtherDriver", message);
    }
    let present = |reason| Finding(TRUE, reason, format!("the driver has {reason}"));
    match info.capability {
        Capability::ListSnapshotDeltas => present("ListSnapshotDeltas"),
        Capability::SnapshotMetadata => present("SnapshotMetadata"),
        Capability::None => Finding(
            FALSE,
            "NoCapability",
            "the driver has no call that reports changed blocks".into(),
        ),
    }
}

fn valid(certificate: &Certificate, now: Timestamp) -> Finding {
    match certificate {
        Certificate::Good { until } => {
            let soon = SystemTime::from(now) + RENEWAL;
            let end = Timestamp::try_from(*until).map_or("?".into(), |end| end.to_string());
            if *until < soon {
                let message = format!("the certificate expires at {end}; renew it");
                return Finding(FALSE, "CertificateExpiring", message);
            }
            Finding(TRUE, "CertificateValid", format!("the certificate is valid until {end}"))
        }
        Certificate::Bad { reason, message } => Finding(FALSE, reason, message.clone()),
        Certificate::Unseen(why) => Finding(UNKNOWN, "NotReached", why.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_keeps_its_transition_time() {
        let [now, later] =
            [1_700_000_000, 1_700_000_060].map(|second| Timestamp::from_second(second).unwrap());
        let probe = |capability| Probe::Called {
            info: Ok(Info { driver: "d".into(), capability }),
            certificate: Certificate::Good { until: SystemTime::from(now) + 2 * RENEWAL },
        };
        let first = conditions("d", Some(1), &probe(Capability::ListSnapshotDeltas), &[], now);
        let same = conditions("d", Some(2), &probe(Capability::SnapshotMetadata), &first, later);
        assert!(same.iter().all(|one| one.last_transition_time.0 == now));
        assert!(same.iter().all(|one| one.observed_generation == Some(2)));
        let other = conditions("d", Some(2), &probe(Capability::None), &same, later);
        assert_eq!(other[0].last_transition_time.0, now);
        assert_eq!(other[1].last_transition_time.0, later);
    }
}

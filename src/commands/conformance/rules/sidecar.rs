//! Rules of the sidecar that clients in a cluster call: TLS, tokens, rights and codes of refusals. The
//! sources are the released protocol (external-snapshot-metadata v1.1.0) and KEP-3314, which differ
//! in the code for a caller without rights: both are accepted.

use tonic::Code;

use super::super::door::{End, Failure, Fault, Query, Refusal, Sidecar, Stream};
use super::super::situations::DELETED;
use super::super::world::World;
use super::{Outcome, Rule, Severity, Verdict, WHOLE, allocated, fail, named};
use grpc::code_name;

const ALL: [Fault; 5] = [
    Fault::NoToken,
    Fault::InvalidToken,
    Fault::OtherAudience,
    Fault::NoRights,
    Fault::NoNamespace,
];
const OPEN: &str = "Any user of the cluster reads which blocks of other users have data.";

pub const RULES: &[Rule] = &[
    Rule {
        id: "sidecar-tls",
        severity: Severity::Must,
        sentence: "The certificate names the host of the address and is issued by the caCert of the SnapshotMetadataService.",
        source: "types.go:31-36, KEP-3314: Snapshot Metadata Service Custom Resource",
        consequence: "No client can connect, or clients turn the verification off.",
        check: tls,
    },
    Rule {
        id: "sidecar-no-token",
        severity: Severity::Must,
        sentence: "A call without a security_token is INVALID_ARGUMENT or UNAUTHENTICATED.",
        source: "schema.proto:49-52, 124-127, KEP-3314: The Kubernetes SnapshotMetadata Service API",
        consequence: OPEN,
        check: |world| {
            refused(world, Fault::NoToken, &[Code::InvalidArgument, Code::Unauthenticated])
        },
    },
    Rule {
        id: "sidecar-invalid-token",
        severity: Severity::Must,
        sentence: "A call with an invalid security_token is UNAUTHENTICATED.",
        source: "schema.proto:49-52, 124-127, KEP-3314: The Kubernetes SnapshotMetadata Service API",
        consequence: OPEN,
        check: |world| refused(world, Fault::InvalidToken, &[Code::Unauthenticated]),
    },
    Rule {
        id: "sidecar-audience",
        severity: Severity::Must,
        sentence: "A call with a token for another audience is UNAUTHENTICATED.",
        source: "types.go:27-30, schema.proto:49-52, KEP-3314: The External Snapshot Metadata Sidecar",
        consequence: "Another service that gets a token of a backup application can use it here.",
        check: |world| refused(world, Fault::OtherAudience, &[Code::Unauthenticated]),
    },
    Rule {
        id: "sidecar-rights",
        severity: Severity::Must,
        sentence: "A caller without access to the VolumeSnapshots of the namespace is refused: PERMISSION_DENIED or UNAUTHENTICATED.",
        source: "schema.proto:50, KEP-3314: The External Snapshot Metadata Sidecar",
        consequence: OPEN,
        check: |world| {
            refused(world, Fault::NoRights, &[Code::PermissionDenied, Code::Unauthenticated])
        },
    },
    Rule {
        id: "sidecar-no-namespace",
        severity: Severity::Must,
        sentence: "A call without a namespace is INVALID_ARGUMENT.",
        source: "schema.proto:54-56, 129-131, KEP-3314: GetMetadataAllocated Errors",
        consequence: "A client that lost the namespace gets an error that it may retry forever.",
        check: |world| refused(world, Fault::NoNamespace, &[Code::InvalidArgument]),
    },
    Rule {
        id: "sidecar-hides-token",
        severity: Severity::Advice,
        sentence: "No error repeats the security_token.",
        source: "KEP-3314: Unit tests",
        consequence: "Logs of clients have tokens, which others can use.",
        check: hides_token,
    },
    Rule {
        id: "sidecar-not-found",
        severity: Severity::Advice,
        sentence: "A call for a deleted VolumeSnapshot is NOT_FOUND.",
        source: "KEP-3314: GetMetadataAllocated Errors",
        consequence: "A client retries UNAVAILABLE until its time is over.",
        check: not_found,
    },
];

fn sidecar<'w>(world: &'w World<'_>) -> Result<&'w dyn Sidecar, Outcome> {
    let only = || Outcome::Skip("only a sidecar shows this (--kubernetes)".to_owned());
    world.door.sidecar().ok_or_else(only)
}

fn tls(world: &World<'_>) -> Verdict {
    match sidecar(world)?.tls_problem() {
        None => Ok(()),
        Some(problem) => Err(fail("TLS handshake".to_owned(), "a trusted certificate", problem)),
    }
}

/// How the sidecar ends a call with a fault, and the token.
fn ended(
    world: &World<'_>,
    sidecar: &dyn Sidecar,
    fault: Fault,
    query: &Query,
) -> Result<(Stream, String), Outcome> {
    // Otherwise a refusal has another reason.
    world.complete(query, WHOLE)?;
    match sidecar.call_with(fault, query) {
        Ok((stream, token)) => match stream.end {
            End::Stopped => Err(Outcome::Stopped),
            _ => Ok((stream, token)),
        },
        Err(Refusal::Stopped) => Err(Outcome::Stopped),
        Err(refusal) => Err(Outcome::Skip(refusal.to_string())),
    }
}

/// Both calls for snapshots that exist, as far as the driver has deltas.
fn both(world: &World<'_>) -> Result<Vec<Query>, Outcome> {
    let (fresh, sparse) = (world.shot("fresh")?, world.shot("sparse")?);
    let delta = super::delta(&fresh.snapshot, &sparse.snapshot);
    let mut calls = vec![allocated(&fresh.snapshot)];
    calls.extend(world.complete(&delta, WHOLE).is_ok().then_some(delta));
    Ok(calls)
}

fn refused(world: &World<'_>, fault: Fault, codes: &[Code]) -> Verdict {
    let sidecar = sidecar(world)?;
    for query in both(world)? {
        let (stream, _) = ended(world, sidecar, fault, &query)?;
        let seen = match stream.end {
            End::Failed(failure) if codes.contains(&failure.code) => continue,
            End::Failed(failure) => failure.to_string(),
            _ => "OK".to_owned(),
        };
        let names: Vec<&str> = codes.iter().map(|code| code_name(*code)).collect();
        let call = named(&query, described(fault), WHOLE);
        return Err(fail(call, names.join(" or "), seen));
    }
    Ok(())
}

fn described(fault: Fault) -> &'static str {
    match fault {
        Fault::NoToken => "a snapshot, without a token",
        Fault::InvalidToken => "a snapshot, with another signature of the token",
        Fault::OtherAudience => "a snapshot, with a token for another audience",
        Fault::NoRights => "a snapshot, by an account without rights",
        Fault::NoNamespace => "a snapshot, without a namespace",
    }
}

fn hides_token(world: &World<'_>) -> Verdict {
    let sidecar = sidecar(world)?;
    let query = allocated(&world.shot("fresh")?.snapshot);
    let mut skipped = None;
    for fault in ALL.into_iter().filter(|fault| *fault != Fault::NoToken) {
        let (stream, token) = match ended(world, sidecar, fault, &query) {
            Ok(ended) => ended,
            Err(Outcome::Skip(reason)) => {
                skipped = Some(reason);
                continue;
            }
            Err(other) => return Err(other),
        };
        if let End::Failed(Failure { code, message, .. }) = stream.end
            && message.contains(&token)
        {
            let call = named(&query, described(fault), WHOLE);
            let seen = format!("{}, with the token", code_name(code));
            return Err(fail(call, "a message without the token", seen));
        }
    }
    skipped.map_or(Ok(()), |reason| Err(Outcome::Skip(reason)))
}

fn not_found(world: &World<'_>) -> Verdict {
    sidecar(world)?;
    let query = allocated(&world.shot(DELETED)?.snapshot);
    let call = named(&query, "a deleted VolumeSnapshot", WHOLE);
    match &world.stream(&query, WHOLE).end {
        End::Failed(failure) if failure.code == Code::NotFound => Ok(()),
        End::Failed(failure) => Err(fail(call, "NOT_FOUND", failure.to_string())),
        End::Stopped => Err(Outcome::Stopped),
        End::Complete | End::Endless(_) => Err(fail(call, "NOT_FOUND", "OK")),
    }
}

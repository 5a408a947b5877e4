//! Restores to claims: of one backup, or of the members of a set.

use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::super::args::VolumeMode;
use super::super::restoring::Done;
use super::job::{self, Data, Work};
use super::rebind::{self, Failed};
use super::{Mover, claim, new_name};
use crate::client::Output;
use kubernetes::name;

/// What to restore to.
#[derive(Clone, Copy)]
pub struct Target<'t> {
    /// Name of the claim; of a set, its beginning.
    pub claim: &'t str,
    pub mode: VolumeMode,
    pub resume: bool,
    pub is_group: bool,
}

/// The facts of a backup that a restore needs, as `backup show --output json` prints them.
#[derive(Deserialize)]
struct Shown {
    id: String,
    volume: String,
    capacity_bytes: u64,
}

/// A backup, and the claim to restore it to.
struct Member {
    backup: Shown,
    claim: String,
    is_new: bool,
}

impl Mover<'_> {
    /// Restores a backup to a claim, or the backups of a set to a claim each. Removes the claims
    /// that it made if one of them fails.
    pub async fn restore(&self, backup: &str, target: &Target<'_>) -> Result<Vec<Done>> {
        if !target.is_group {
            // Before a pod starts.
            self.stop.wait(self.is_new(target.claim, target.mode)).await?;
        }
        let members = self.members(backup, target).await?;
        let mut done = Vec::with_capacity(members.len());
        for (number, member) in members.iter().enumerate() {
            match self.restore_member(member, target).await {
                Ok(restored) => done.push(restored),
                Err(mut error) => {
                    for earlier in members.iter().take(number).filter(|earlier| earlier.is_new) {
                        if let Err(left) = self.delete_claim(&earlier.claim).await {
                            let claim = &earlier.claim;
                            error = error.context(format!("claim {claim} remains: {left:#}"));
                        }
                    }
                    return Err(error);
                }
            }
        }
        Ok(done)
    }

    /// What to restore where.
    async fn members(&self, backup: &str, target: &Target<'_>) -> Result<Vec<Member>> {
        let mut args = ["backup", "show", backup].map(str::to_owned).to_vec();
        args.extend(target.is_group.then(|| "--group".to_owned()));
        let shown = self.result(args, Data::None).await?;
        let backups = match target.is_group {
            true => parse(&shown)?,
            false => vec![parse::<Shown>(&shown)?],
        };
        let mut members = Vec::with_capacity(backups.len());
        for backup in backups {
            let claim = match target.is_group {
                true => claim_of(target.claim, &backup)?,
                false => target.claim.to_owned(),
            };
            let is_new = self.stop.wait(self.is_new(&claim, target.mode)).await?;
            members.push(Member { backup, claim, is_new });
        }
        Ok(members)
    }

    /// Whether the claim must be made.
    ///
    /// # Errors
    /// It exists and cannot be restored to.
    async fn is_new(&self, name: &str, mode: VolumeMode) -> Result<bool> {
        let existing = self.claim(name).await?;
        let Some(existing) = existing else { return Ok(true) };
        match claim::check(name, &existing, mode) {
            Ok(()) => Ok(false),
            Err(error) => match rebind::interrupted(self, &existing).await {
                Some(step) => Err(error.context(step)),
                None => Err(error),
            },
        }
    }

    async fn restore_member(&self, member: &Member, target: &Target<'_>) -> Result<Done> {
        let Member { backup, claim, is_new } = member;
        let name = match target.mode {
            VolumeMode::Block => claim.clone(),
            VolumeMode::Filesystem => new_name()?,
        };
        if *is_new {
            self.create_claim(&name, backup.capacity_bytes).await?;
        }
        let restored = self.restore_to(&backup.id, &name, target.resume && !is_new).await;
        let failed = match restored {
            Ok(restored) if target.mode == VolumeMode::Block => {
                return Ok(in_claim(restored, claim));
            }
            Ok(restored) => match rebind::rebind(self, &name, claim).await {
                Ok(()) => return Ok(in_claim(restored, claim)),
                Err(Failed::Remains(error)) => return Err(error),
                Err(Failed::Undone(error)) => error,
            },
            Err(error) => error,
        };
        if !is_new {
            return Err(failed);
        }
        match self.delete_claim(&name).await {
            Ok(()) => Err(failed),
            Err(left) => Err(failed.context(format!("claim {name} remains: {left:#}"))),
        }
    }

    async fn restore_to(&self, id: &str, claim: &str, resume: bool) -> Result<Done> {
        let mut args = vec!["restore".to_owned(), id.to_owned(), format!("--to={}", job::DEVICE)];
        args.extend(resume.then(|| "--resume".to_owned()));
        parse(&self.result(args, Data::Claim(claim)).await?)
    }

    /// What a command in a pod prints as JSON.
    async fn result(&self, args: Vec<String>, data: Data<'_>) -> Result<String> {
        self.run(Work { output: Output::Json, data, ..self.work(args) }).await
    }

    async fn create_claim(&self, name: &str, bytes: u64) -> Result<()> {
        let claim = claim::empty(name, bytes, self.flags.storage_class.as_deref())?;
        self.create(&self.claims(), claim).await
    }

    /// Deletes a claim of this command, and returns when it is gone.
    pub(super) async fn delete_claim(&self, name: &str) -> Result<()> {
        self.discard(&self.claims(), name, Duration::ZERO).await
    }
}

fn in_claim(restored: Done, claim: &str) -> Done {
    restored.with_target(format!("claim {claim}"))
}

fn parse<T: DeserializeOwned>(shown: &str) -> Result<T> {
    serde_json::from_str(shown).context("the mover pod did not print a result")
}

/// The claim of a member of a set.
fn claim_of(prefix: &str, backup: &Shown) -> Result<String> {
    name::object(&format!("{prefix}-{}", backup.volume)).map_err(|error| {
        anyhow!("the claim {prefix}-{} {error}; restore backup {} alone", backup.volume, backup.id)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_claim_of_a_member_is_named_after_its_volume() {
        let shown = |volume: &str| Shown {
            id: "1".to_owned(),
            volume: volume.to_owned(),
            capacity_bytes: 1,
        };
        assert_eq!(claim_of("restored", &shown("orders")).unwrap(), "restored-orders");
        for wrong in ["", "a/b", "A"] {
            let error = claim_of("restored", &shown(wrong)).unwrap_err().to_string();
            assert!(error.contains("restore backup 1 alone"), "{error}");
        }
    }
}

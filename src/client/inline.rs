//! `volume inline`: the volumes of pods (KEP-596), asked for as kubelet asks for them: by a handle that the caller
//! chooses, made and mounted by one call, gone with another.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};

use super::Output;
use super::capability::CapabilityArgs;
use super::connection::{Connection, refused};
use super::stats::stats;
use super::volume::{absolute, check_defers, done, make_parent};
use crate::proto::csi::v1 as csi;

/// What kubelet says of the volume of a pod (podInfoOnMount).
const EPHEMERAL: (&str, &str) = ("csi.storage.k8s.io/ephemeral", "true");

#[derive(Debug, Subcommand)]
pub enum InlineCommand {
    /// Make a volume and mount it; once more, refresh its content
    Publish(PublishArgs),
    /// Show how full a volume is, and whether it is well
    Stats {
        /// As it was published
        handle: String,
        #[arg(long, value_name = "PATH")]
        target: PathBuf,
    },
    /// Unmount a volume and delete it
    Unpublish {
        /// As it was published
        handle: String,
        #[arg(long, value_name = "PATH")]
        target: PathBuf,
    },
}

#[derive(Debug, Args)]
pub struct PublishArgs {
    /// Name of the volume, free to choose: letters, digits, '-', '_' and '.'
    handle: String,
    /// Directory that the driver makes
    #[arg(long, value_name = "PATH")]
    target: PathBuf,
    /// Attribute, such as size=64Mi, content/motd=hello or medium=Memory; may be repeated
    #[arg(long, value_parser = pair, value_name = "KEY=VALUE")]
    attribute: Vec<(String, String)>,
    /// Key of a secret and the file that holds its value; may be repeated
    #[arg(long, value_parser = pair, value_name = "KEY=FILE")]
    secret: Vec<(String, String)>,
    /// As volumes[].csi.readOnly: required for content and secrets, to which the driver alone writes
    #[arg(long)]
    read_only: bool,
    /// Have a container runtime mount the filesystem, and nothing on this host
    #[arg(long)]
    defer_fs_ops: bool,
    #[command(flatten)]
    capability: CapabilityArgs,
}

/// A key and what comes after the first '='.
fn pair(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(key, _)| !key.is_empty());
    let (key, value) = pair.ok_or_else(|| "has to be KEY=VALUE".to_owned())?;
    Ok((key.to_owned(), value.to_owned()))
}

pub async fn run(connection: &Connection, command: InlineCommand, output: Output) -> Result<()> {
    match command {
        InlineCommand::Publish(args) => publish(connection, args, output).await,
        InlineCommand::Stats { handle, target } => {
            stats(connection, handle, &target, false, output).await
        }
        InlineCommand::Unpublish { handle, target } => {
            let request = csi::NodeUnpublishVolumeRequest {
                volume_id: handle.clone(),
                target_path: absolute(&target)?,
                ..Default::default()
            };
            connection.node().node_unpublish_volume(request).await.map_err(refused)?;
            done(output, &handle, "unpublished and deleted")
        }
    }
}

async fn publish(connection: &Connection, args: PublishArgs, output: Output) -> Result<()> {
    let PublishArgs { handle, target, attribute, secret, read_only, defer_fs_ops, capability } =
        args;
    if defer_fs_ops {
        check_defers(connection).await?;
    }
    make_parent(&target)?;
    let ephemeral = (EPHEMERAL.0.to_owned(), EPHEMERAL.1.to_owned());
    let secrets = secret.into_iter().map(|(key, file)| {
        let value = fs::read_to_string(&file);
        Ok((key, value.with_context(|| format!("read {file}, which has to be text"))?))
    });
    let request = csi::NodePublishVolumeRequest {
        volume_id: handle.clone(),
        target_path: absolute(&target)?,
        volume_capability: Some(capability.capability()),
        readonly: read_only,
        volume_context: attribute.into_iter().chain([ephemeral]).collect(),
        secrets: secrets.collect::<Result<_>>()?,
        defer_fs_ops,
        ..csi::NodePublishVolumeRequest::default()
    };
    connection.node().node_publish_volume(request).await.map_err(refused)?;
    done(output, &handle, "published")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_may_have_an_equals_sign_in_it() {
        let owned = |key: &str, value: &str| Ok((key.to_owned(), value.to_owned()));
        assert_eq!(pair("content/a=b=c"), owned("content/a", "b=c"));
        assert_eq!(pair("content/a="), owned("content/a", ""));
        assert!(pair("size").is_err() && pair("=x").is_err());
    }
}

//! The options that say how the VMM is confined.

use std::path::PathBuf;

use clap::Args;
use jailer::Part;
use jailer::users::{self, Users};

use crate::spec;
use crate::units::parse_size;

/// How the VMM is confined.
#[derive(Debug, Args)]
#[command(next_help_heading = "Confinement")]
pub(crate) struct Jail {
    /// Start only with a cgroup that bounds memory and processes [default for root]
    #[arg(long)]
    require_cgroup: bool,
    /// Bound the disk's traffic: rbps=SIZE,wbps=SIZE,riops=N,wiops=N, one or more of them, by the second
    #[arg(long, value_name = "LIMITS", value_parser = io_max)]
    io_max: Option<String>,
    /// Start although the host cannot give this part: namespaces, landlock or cgroup
    #[arg(long, value_name = "PART", value_parser = part)]
    allow_unenforced: Vec<Part>,
    /// As root: the users of which each VMM becomes one that no other has
    #[arg(long, value_name = "FIRST-LAST", default_value_t = users::DEFAULT)]
    users: Users,
}

/// For the spec.
pub(crate) fn resolve(args: &Jail, cpu: Option<u64>, jailer: PathBuf) -> spec::Jail {
    spec::Jail {
        jailer,
        users: args.users.to_string(),
        require_cgroup: args.require_cgroup || rustix::process::geteuid().is_root(),
        cpu,
        io_max: args.io_max.clone(),
        allow_unenforced: args.allow_unenforced.iter().map(ToString::to_string).collect(),
    }
}

/// Number of vCPUs, and the CPU time that they share if it is less than that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cpus {
    /// vCPUs.
    pub(crate) count: u8,
    /// Thousandths of a CPU.
    pub(crate) thousandths: Option<u64>,
}

/// `2`, or `1.5`: then two vCPUs that share the time of one and a half CPUs.
pub(super) fn cpus(text: &str) -> Result<Cpus, String> {
    let wrong = || format!("expected a number from 0.01 to {} with at most three decimals", vmm_control::MAX_VCPUS);
    let (whole, decimals) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(decimals) || decimals.len() > 3 {
        return Err(wrong());
    }
    let thousandths: u64 = format!("{whole}{decimals:0<3}").parse().map_err(|_| wrong())?;
    if !(10..=u64::from(vmm_control::MAX_VCPUS).saturating_mul(1000)).contains(&thousandths) {
        return Err(wrong());
    }
    let count = u8::try_from(thousandths.div_ceil(1000)).map_err(|_| wrong())?;
    Ok(Cpus { count, thousandths: Some(thousandths).filter(|part| part % 1000 != 0) })
}

/// As `io.max` has it: `rbps=1048576 riops=100`.
fn io_max(text: &str) -> Result<String, String> {
    let limits = text.split(',').map(|limit| {
        let (name, value) = limit.split_once('=').ok_or_else(|| format!("{limit:?}: expected NAME=VALUE"))?;
        let value = match name {
            "rbps" | "wbps" => parse_size(value).map_err(|error| error.to_string())?,
            "riops" | "wiops" => {
                value.parse().ok().filter(|n| *n > 0).ok_or_else(|| format!("{limit:?}: expected a number above 0"))?
            }
            _ => return Err(format!("{name:?}: not one of rbps, wbps, riops, wiops")),
        };
        Ok(format!("{name}={value}"))
    });
    Ok(limits.collect::<Result<Vec<_>, _>>()?.join(" "))
}

fn part(text: &str) -> Result<Part, String> {
    Part::from_name(text).ok_or_else(|| format!("not one of {}", Part::ALL.map(Part::name).join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_may_be_shared() {
        let parsed = |text| cpus(text).map(|cpus| (cpus.count, cpus.thousandths));
        assert_eq!(parsed("2"), Ok((2, None)));
        assert_eq!(parsed("2.0"), Ok((2, None)));
        assert_eq!(parsed("1.5"), Ok((2, Some(1500))));
        assert_eq!(parsed("0.01"), Ok((1, Some(10))));
        assert_eq!(parsed("32"), Ok((32, None)));
        for wrong in ["0", "0.009", "32.001", "1.", ".5", "1.0001", "-1", "1e3", "two", ""] {
            assert!(parsed(wrong).unwrap_err().contains("from 0.01 to 32"), "{wrong}");
        }
    }

    #[test]
    fn disk_limits_are_as_the_kernel_has_them() {
        assert_eq!(io_max("rbps=1M,wiops=100").unwrap(), "rbps=1048576 wiops=100");
        for wrong in ["", "rbps", "rbps=", "speed=1", "riops=0", "riops=1k", "rbps=1M,"] {
            assert!(io_max(wrong).is_err(), "{wrong}");
        }
    }
}

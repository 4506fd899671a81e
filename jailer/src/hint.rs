//! What to do about a step that this host does not let us take.

use rustix::io::Errno;

use crate::report::Step;
use crate::request::Part;

/// The part of the jail that a failed step belongs to; nothing if it is one that every host has.
pub(crate) fn part(step: Step, error: Errno) -> Option<Part> {
    match (step, error) {
        // From CLONE_INTO_CGROUP: see the kernel's cgroup-v2 document on migration.
        (Step::Clone, Errno::BUSY | Errno::OPNOTSUPP | Errno::ACCESS | Errno::NODEV | Errno::NOENT) => {
            Some(Part::Cgroup)
        }
        (Step::Clone | Step::Map | Step::PrivateMounts | Step::EmptyRoot | Step::Pivot | Step::Capabilities, _) => {
            Some(Part::Namespaces)
        }
        (Step::Landlock, _) => Some(Part::Landlock),
        _ => None,
    }
}

/// The next step, as a clause that follows the error.
pub(crate) fn next_step(step: Step, error: Errno) -> String {
    let setting = |path: &str| std::fs::read_to_string(path).ok();
    next_step_with(step, error, &setting)
}

fn next_step_with(step: Step, error: Errno, setting: &dyn Fn(&str) -> Option<String>) -> String {
    let is = |path: &str, value: &str| setting(path).is_some_and(|text| text.trim() == value);
    let refused = matches!(error, Errno::PERM | Errno::ACCESS);
    let text = match part(step, error) {
        Some(Part::Namespaces) if is("/proc/sys/kernel/unprivileged_userns_clone", "0") => {
            "unprivileged user namespaces are switched off: sysctl -w kernel.unprivileged_userns_clone=1"
        }
        Some(Part::Namespaces) if is("/proc/sys/user/max_user_namespaces", "0") => {
            "user namespaces are switched off: sysctl -w user.max_user_namespaces=10000"
        }
        Some(Part::Namespaces) if refused && is("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1") => {
            "AppArmor takes the rights from unprivileged user namespaces: give bulkhead-jailer a profile with \"userns,\", \
             or sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        }
        Some(Part::Namespaces) if error == Errno::NOSPC => {
            "too many namespaces exist: end some runs, or raise the limits in /proc/sys/user"
        }
        Some(Part::Namespaces) if refused => {
            "something forbids namespaces here, such as a container: give it the right, or start outside of it"
        }
        Some(Part::Landlock) if error == Errno::OPNOTSUPP => {
            "Landlock is switched off: boot with landlock in the list of lsm= on the kernel's command line"
        }
        Some(Part::Landlock) if error == Errno::NOSYS => "this kernel has no Landlock: use Linux 5.13 or later",
        _ if step == Step::Program => "the program is no static executable: install it again",
        _ => "",
    };
    let separator = if text.is_empty() { "" } else { "; " };
    format!("{separator}{text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(step: Step, error: Errno, path: &str, value: &str) -> String {
        next_step_with(step, error, &|asked| (asked == path).then(|| format!("{value}\n")))
    }

    #[test]
    fn each_way_to_forbid_namespaces_is_told_apart() {
        let debian = said(Step::Clone, Errno::PERM, "/proc/sys/kernel/unprivileged_userns_clone", "0");
        assert!(debian.ends_with("sysctl -w kernel.unprivileged_userns_clone=1"), "{debian}");
        let zero = said(Step::Clone, Errno::NOSPC, "/proc/sys/user/max_user_namespaces", "0");
        assert!(zero.contains("user.max_user_namespaces"), "{zero}");
        // There the namespaces can be made, and only then nothing is allowed in them.
        let ubuntu =
            said(Step::PrivateMounts, Errno::ACCESS, "/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1");
        assert!(ubuntu.contains("kernel.apparmor_restrict_unprivileged_userns=0"), "{ubuntu}");
        assert!(said(Step::Clone, Errno::PERM, "", "").contains("container"));
        assert!(said(Step::Clone, Errno::NOSPC, "", "").contains("too many"));
    }

    #[test]
    fn a_cgroup_that_refuses_is_no_matter_of_namespaces() {
        assert_eq!(part(Step::Clone, Errno::BUSY), Some(Part::Cgroup));
        assert_eq!(part(Step::Clone, Errno::PERM), Some(Part::Namespaces));
        assert_eq!(part(Step::Seccomp, Errno::PERM), None);
        assert_eq!(said(Step::Limits, Errno::PERM, "", ""), "");
    }
}

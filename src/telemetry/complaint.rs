//! What goes wrong again and again is told once.

/// What was told last of what goes wrong.
#[derive(Debug, Default)]
pub struct Complaint(Option<String>);

impl Complaint {
    /// Notes what goes wrong now; whether that is to be told, since it was not the last thing told.
    pub fn is_new(&mut self, problem: &str) -> bool {
        let known = self.0.as_deref() == Some(problem);
        if !known {
            self.0 = Some(problem.to_owned());
        }
        !known
    }

    /// Notes that all is well; whether something was wrong.
    pub fn is_over(&mut self) -> bool {
        self.0.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_complaint_is_told_once_until_it_changes_or_is_over() {
        let mut complaint = Complaint::default();
        assert!(!complaint.is_over());
        assert_eq!(
            ["a", "a", "b", "a"].map(|text| complaint.is_new(text)),
            [true, false, true, true]
        );
        assert!(complaint.is_over() && !complaint.is_over());
        assert!(complaint.is_new("a"));
    }
}

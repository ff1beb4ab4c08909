//! How long a fine-tuning is, and what happens at which of its steps.

use crate::lr_factor;
use querl_core::config::SftConfig;

/// Steps of a fine-tuning, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Plan {
    /// Rows of one optimizer step; the last step of an epoch takes what is left.
    pub(super) rows_per_step: usize,
    pub(super) steps_per_epoch: u64,
    pub(super) n_steps: u64,
    n_warmup: u64,
    eval_steps: u64,
    save_steps: u64,
}

impl Plan {
    pub(super) fn new(config: &SftConfig, n_rows: usize) -> Self {
        let rows_per_step = config.batch_size * config.gradient_accumulation_steps;
        let steps_per_epoch = n_rows.div_ceil(rows_per_step) as u64;
        let planned = steps_per_epoch * config.epochs as u64;
        let n_steps = if config.max_steps > 0 { planned.min(config.max_steps as u64) } else { planned };
        // At least one step at full rate, however short the run.
        let n_warmup = ((config.warmup_ratio * n_steps as f64).ceil() as u64).min(n_steps.saturating_sub(1));
        let or_epoch = |n: usize| if n > 0 { n as u64 } else { steps_per_epoch };
        let (eval_steps, save_steps) = (or_epoch(config.eval_steps), or_epoch(config.save_steps));
        Self { rows_per_step, steps_per_epoch, n_steps, n_warmup, eval_steps, save_steps }
    }

    pub(super) fn learning_rate(&self, config: &SftConfig, step: u64) -> f64 {
        config.learning_rate * lr_factor(config.lr_scheduler, step - 1, self.n_warmup, self.n_steps)
    }

    pub(super) fn is_last(&self, step: u64) -> bool {
        step >= self.n_steps
    }

    pub(super) fn evaluates(&self, step: u64) -> bool {
        self.is_last(step) || step.is_multiple_of(self.eval_steps)
    }

    pub(super) fn saves(&self, step: u64) -> bool {
        step.is_multiple_of(self.save_steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_means_once_an_epoch_and_the_last_step_evaluates() {
        let config = SftConfig { epochs: 2, eval_steps: 0, save_steps: 0, max_steps: 5, ..SftConfig::default() };
        let plan = Plan::new(&config, 40); // 16 rows a step: 3 steps an epoch
        assert_eq!((plan.steps_per_epoch, plan.n_steps), (3, 5));
        let at = |is: fn(&Plan, u64) -> bool| (1..=5).filter(|step| is(&plan, *step)).collect::<Vec<_>>();
        assert_eq!((at(Plan::evaluates), at(Plan::saves)), (vec![3, 5], vec![3]));
    }

    #[test]
    fn a_run_of_one_step_learns() {
        let config = SftConfig { max_steps: 1, warmup_ratio: 1.0, learning_rate: 0.5, ..SftConfig::default() };
        assert_eq!(Plan::new(&config, 40).learning_rate(&config, 1), 0.5);
    }
}

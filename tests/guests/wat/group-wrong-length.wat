;; Returns 1000 scores for groups of more than one episode.
;;! contract 0.2.0
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/group-rewards@0.1.0;
(module
  ;;! include memory
  ;;! include describe
  ;;! include check-settings
  ;;! include range
  (func (export "querl:plugin/group-rewards@0.1.0#score-group") (param i32) (param $n_episodes i32) (result i32)
    (i32.store (i32.const 256) (i32.const 40000))
    (f64.store (i32.const 40008) (f64.const 0.5))
    (i32.store (i32.const 260) (i32.const 1))
    (if (i32.gt_u (local.get $n_episodes) (i32.const 1)) (then (i32.store (i32.const 260) (i32.const 1000))))
    (i32.const 256))
)

;; Returns 1000 scores for any number of episodes.
(module
  ;;! include memory
  ;;! include describe
  ;;! include check-settings
  ;;! include range
  (func (export "querl:plugin/rewards@0.1.0#score-batch") (param i32 i32) (result i32)
    (i32.store (i32.const 256) (i32.const 40000))
    (i32.store (i32.const 260) (i32.const 1000))
    (i32.const 256))
)

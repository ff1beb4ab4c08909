;; A reward that does not say who it is.
;;! world export querl:plugin/rewards@0.1.0;
(module
  ;;! include memory
  ;;! include range
  ;;! include scores
  (func $odd (param i32))
)

;; A reward that does not export name and version.
;;! world export querl:plugin/rewards@0.1.0;
(module
  ;;! include memory
  ;;! include range
  ;;! include scores
  (func $odd (param i32))
)

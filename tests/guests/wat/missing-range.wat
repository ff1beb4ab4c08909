;; A reward that does not export its range.
;;! lacks rewards range: func() -> bounds;
(module
  ;;! include memory
  ;;! include describe
  ;;! include check-settings
  ;;! include scores
  (func $odd (param i32))
)

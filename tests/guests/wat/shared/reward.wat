  ;;! include memory
  ;;! include describe
  ;;! include check-settings
  ;;! include range
  ;;! include scores
